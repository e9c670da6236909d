"""Finds a call in a program by its syntax tree, and edits it there; every other character stays."""

from __future__ import annotations

import ast
import io
import itertools
import textwrap
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

from ddpkit.errors import LaunchError

DDP = "DistributedDataParallel"
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


@dataclass(frozen=True)
class CallEdit:
    """One edit of every call of `call`: exactly one of the fields from `set` to `function` says which.

    `call` is the end of a dotted name, found under whatever name the program imports it; or a method, such as ".step".
    `set` gives an argument ("drop_last=True") and `drop` names arguments to take out. `before` and `after` are statements;
    of each block only the first call counts. `within` is a `with` line around the statement. `function` is what is
    called instead. In these texts {owner} is what the method is called on, and {ddp} the variable of the DDP model.
    `needs` is an import that they use.
    """

    call: str
    set: str = ""
    drop: Sequence[str] = ()
    before: str = ""
    after: str = ""
    within: str = ""
    function: str = ""
    needs: str = ""

    @property
    def by_hand(self) -> str:
        """The same edit as an instruction: `put find_unused_parameters=True into the call of DistributedDataParallel`."""
        there = f"the call of {self.call}"
        if self.drop:
            return f"take {self.drop[0]} out of {there}"
        if self.function:
            return f"call the DDP model itself in place of {self.call}"
        text = _with(self.set or self.before or self.after or self.within, "optimizer", "ddp")
        where = "into" if self.set else "before" if self.before else "after" if self.after else "around"
        return f"put {text} {where} {there}"


def edited(script: str, edit: CallEdit) -> str:
    """`script` with `edit` put in at each call that it is about.

    Raises:
        LaunchError: there is no such call, nothing would change, or the program would not compile.
    """
    try:
        program = _Program(script)
        for call in program.calls(edit.call):
            program.change(call, edit)
        if not program.changes:
            raise LaunchError(f"an edit does not fit: {edit.by_hand}")
        text = program.text(edit.needs)
        ast.parse(text)
    except SyntaxError as error:
        raise LaunchError(f"an edit does not fit: {edit.by_hand} ({error.msg})") from None
    return text


class _Program:
    """A program's text with its syntax tree, and the changes to make: (start, end, new text)."""

    def __init__(self, script: str) -> None:
        self.script, self.tree = script, ast.parse(script)
        self.changes: list[tuple[int, int, str]] = []
        self._lines = list(io.StringIO(script))
        self._starts = list(itertools.accumulate(map(len, self._lines), initial=0))
        self._tokens = []
        for token in tokenize.generate_tokens(io.StringIO(script).readline):
            if token.type not in _NO_CODE:
                self._tokens.append((self._starts[token.end[0] - 1] + token.end[1], token.string))
        self._parents: dict[ast.AST, ast.AST] = {}
        # What each imported name means: DDP is torch.nn.parallel.DistributedDataParallel.
        self.names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            self._parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                root = one.name if isinstance(node, ast.ImportFrom) or one.asname else one.name.partition(".")[0]
                self.names[one.asname or root] = f"{getattr(node, 'module', '')}.{root}"
        self._edited: set[ast.AST] = set()

    def calls(self, name: str) -> list[ast.Call]:
        """The calls of `name`, in the order of the text."""
        found = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self._is(node, name)]
        return sorted(found, key=self._span)

    def _is(self, call: ast.Call, name: str) -> bool:
        if name.startswith("."):
            return isinstance(call.func, ast.Attribute) and call.func.attr == name[1:]
        root, dot, rest = self._source(call.func).partition(".")
        return root in self.names and f".{self.names[root]}{dot}{rest}".endswith(f".{name}")

    def change(self, call: ast.Call, edit: CallEdit) -> None:
        """Note what `edit` changes at `call`; nothing where it finds no place."""
        if edit.set:
            self._set(call, edit.set)
        elif edit.drop:
            self._drop(call, edit.drop)
        elif edit.function:
            self.changes.append((*self._span(call.func), self._filled(edit.function, call)))
        elif text := self._filled(edit.before or edit.after or edit.within, call):
            self._beside(call, text, edit)

    def _set(self, call: ast.Call, argument: str) -> None:
        """Replace the argument of that name, or add it in the way in which the call is laid out."""
        for keyword in call.keywords:
            if keyword.arg == argument.partition("=")[0]:
                if self._source(keyword) != argument:
                    self.changes.append((*self._span(keyword), argument))
                return
        close = self._span(call)[1] - 1
        end, last = self._last_token(close)
        line = self._starts[(call.end_lineno or 1) - 1]
        if self.script[line:close].strip() or last == "(":
            comma = {"(": "", ",": " "}.get(last, ", ")
            self.changes.append((end, end, comma + argument))
            return
        if last != ",":
            self.changes.append((end, end, ","))
        last_argument = self._lines[(call.keywords or call.args)[-1].lineno - 1]
        indent = last_argument[: len(last_argument) - len(last_argument.lstrip())]
        self.changes.append((line, line, f"{indent}{argument},\n"))

    def _drop(self, call: ast.Call, names: Sequence[str]) -> None:
        for keyword in call.keywords:
            if keyword.arg in names:
                start, end = self._span(keyword)
                before, token = self._last_token(start)
                self.changes.append((before - 1 if token == "," else start, end, ""))

    def _beside(self, call: ast.Call, text: str, edit: CallEdit) -> None:
        """Put `text` before, after or around the statement of `call`; a statement with a block of its own is left alone."""
        statement: ast.AST = call
        while not isinstance(statement, ast.stmt):
            statement = self._parents[statement]
        block = self._parents[statement]
        if hasattr(statement, "body") or block in self._edited:
            return
        self._edited.add(block)
        start, end = self._span(statement)
        line, after = self._starts[statement.lineno - 1], self._starts[statement.end_lineno or 0]
        indent = self.script[line:start]
        if not indent.strip() and not self.script[end:after].partition("#")[0].strip():
            inside = textwrap.indent(self.script[line:after], "    ") if edit.within else ""
            new = f"{textwrap.indent(text, indent)}\n{inside}"
            ended = "" if self.script[:after].endswith("\n") or not edit.after else "\n"
            self.changes.append((after if edit.after else line, line if edit.before else after, ended + new))
        elif not edit.within:
            self.changes.append((end, end, f"; {text}") if edit.after else (start, start, f"{text}; "))

    def _filled(self, text: str, call: ast.Call) -> str:
        """`text` with its {owner} and {ddp}; "" where the DDP model has not one name, or `call` does not see it."""
        owner = self._source(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        models = {}
        for wrap in self.calls(DDP):
            assigned = self._parents[wrap]
            if isinstance(assigned, ast.Assign):
                models[self._source(assigned.targets[0])] = self._function(assigned)
        name, scope = next(iter(models.items()), ("", None))
        seen = len(models) == 1 and (scope in (None, self._function(call)) or name.startswith("self."))
        return _with(text, owner, name) if seen or "{ddp}" not in text else ""

    def _function(self, node: ast.AST) -> ast.AST | None:
        """The function around `node`; None at the top of the program."""
        around = self._parents.get(node)
        while around and not isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
            around = self._parents.get(around)
        return around

    def text(self, needs: str) -> str:
        """The program with every change made, and with the import `needs` unless its name is imported already."""
        if needs and needs.rpartition(" ")[2].partition(".")[0] not in self.names:
            body = self.tree.body[bool(ast.get_docstring(self.tree)) :]
            first = next(s for s in body if not (isinstance(s, ast.ImportFrom) and s.module == "__future__"))
            self.changes.append((self._starts[first.lineno - 1], self._starts[first.lineno - 1], f"{needs}\n"))
        text = self.script
        for start, end, new in sorted(self.changes, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Where `node` starts and ends in the text; the tree counts bytes."""
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno or 0, node.end_col_offset or 0)

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _source(self, node: ast.expr | ast.keyword) -> str:
        start, end = self._span(node)
        return self.script[start:end]

    def _last_token(self, before: int) -> tuple[int, str]:
        """The end and text of the last token that ends at `before` or earlier."""
        return [token for token in self._tokens if token[0] <= before][-1]


def _with(text: str, owner: str, ddp: str) -> str:
    return text.replace("{owner}", owner).replace("{ddp}", ddp)
