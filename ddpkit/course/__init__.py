"""The course: labs, the bench with its remedies, exercises and their grading, recorded runs."""
