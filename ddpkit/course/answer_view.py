"""The questions of an `Answer` in a notebook, as ipywidgets: a choice for each, and one button."""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

# Answers in a list, and characters of all answers on buttons.
FEW, SHORT = 8, 60


class AnswerView:
    """The widgets of one `Answer`; `box` holds them all."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self._choices = [self._choice(question.offers) for question in answer.questions]
        self._button = widgets.Button(description="Answer", button_style="primary", disabled=True)
        self._say = widgets.HTML()
        rows = []
        for question, choice in zip(answer.questions, self._choices, strict=True):
            rows += [widgets.HTML(f"<b>{escape(question.asks)}</b>"), choice]
        self.box = widgets.VBox([*rows, self._button, self._say], layout=widgets.Layout(width="100%"))
        self.box.add_class("ddpkit-answer")
        for choice in self._choices:
            choice.observe(lambda _: self._changed(), "value")
        self._button.on_click(lambda _: self._clicked())
        self._changed()

    def _choice(self, offers: tuple[str, ...]) -> Any:
        """Buttons for a few short answers, a list for a few long ones, and a menu for the lines of a program."""
        if sum(map(len, offers)) <= SHORT:
            return widgets.ToggleButtons(options=offers, value=None, style={"button_width": "auto"})
        kind = widgets.RadioButtons if len(offers) <= FEW else widgets.Dropdown
        return kind(options=offers, value=None, layout=widgets.Layout(width="auto", max_width="100%"))

    def _changed(self) -> None:
        kept = self._answer.kept
        open_ones = sum(choice.value is None for choice in self._choices)
        self._button.disabled = kept or open_ones > 0
        for choice in self._choices:
            choice.disabled = kept
        words = repr(self._answer) if kept else f"{open_ones} still to answer." if open_ones else ""
        self._say.value = f'<div role="status">{escape(words)}</div>'

    def _clicked(self) -> None:
        self._answer.give(*(choice.value for choice in self._choices))
        self._changed()
