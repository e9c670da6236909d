"""How runs are shown: live view, text, HTML and figures. Facts go in, pixels come out."""
