r"""The answer at the end of a reply without a box, where math-verify looks for numbers alone: an expression
(``The answer is x/2.``), several numbers (``5 and 6``) and a congruence."""

from __future__ import annotations

import re

END = 400
"""Characters at a reply's end in which its answer is looked for."""

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|theta"
_LAST_TAG = re.compile(r"<(?P<tag>[A-Za-z]\w{0,20})>([^<>]*)</(?P=tag)>[\s.*]*\Z", re.ASCII)
_BEFORE = re.compile(r"\n|(?<=[A-Za-z*]):|\b(?:is|are|be|equals|it['’]s)\b:?", re.IGNORECASE)
"""A line end, a colon or a verb: the last one stands before the answer."""
_ASSIGNED = re.compile(r"[A-Za-z]'{0,3}(?:\([A-Za-z]\))? ?= ?(?!=)")
_EXPRESSION = re.compile(
    rf"(?:\d++(?:\.\d++)?+|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z]{{1,2}})(?![A-Za-z])"
    r"|[-+*/^()√π²³·×−]|\\[a-z]++|[{}]| (?! ))++",
    re.ASCII,
)
_LISTED = re.compile(
    rf"(?:\d++(?:\.\d++)?+|(?<![A-Za-z])(?:{_FUNCTIONS}|oo|[A-Za-z](?:_\{{?\w\}}?)?)(?![A-Za-z])"
    r"|[<>!]=|[-+*/^()√π²³·×−∞±∪\[\]{}<>≤≥≠]|(?:(?<=[A-Za-z])|(?<=_\w)|(?<=\})) ?= ?|\\[a-z]++"
    r"|(?<=\d) ?: ?(?=\d)|,(?! ?,)| (?! ))++",
    re.ASCII,
)
"""Several values, a relation or a ratio."""
_WORD = re.compile(r",? (?:and|or) ")
_OF_SEVERAL = re.compile(r"[,<>≤≥≠±∪]|!=|\d ?: ?\d")
_THOUSANDS = re.compile(r"[-+−]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_RELATIONS = {">=": r"\ge ", "<=": r"\le ", "!=": r"\ne "}
_OPERATION = re.compile(
    r"\\[a-z]|[A-Za-z)\d] ?[-+*/^·×−²³] ?[A-Za-z(\d√π-]|[A-Za-z)\d][²³]|\d[A-Za-z(]|[A-Za-z]\(|√|π"
    rf"|\b(?:{_FUNCTIONS})\b"
)
_NUMBER = r"(?:[A-Za-z] ?= ?)?[-−]?(?:\d{1,15}(?:\.\d{1,15})?(?:/\d{1,9})?)"
_SEVERAL = re.compile(
    rf"(?P<not>\b(?:not|n['’]t)[^.\n]{{0,20}})?(?<![\w.,/$])(?P<first>{_NUMBER}(?:, ?{_NUMBER}){{0,9}})"
    rf",? (?:and|or) (?P<last>{_NUMBER})[\s.!*_`]*\Z",
    re.ASCII,
)
_RATIO = re.compile(
    rf"(?P<range>\bfrom )?(?<![\w.,/$:])[$(\\]*(?P<first>{_NUMBER})[$)\\]*"
    rf"(?:[ -]to[ -]| *\\text ?\{{ *to *\}} *)[$(\\]*(?P<last>{_NUMBER})[$)\\\s.!*_`]*\Z",
    re.ASCII,
)
"""A ratio in words, and after ``from`` a range."""
_FACTORIAL = re.compile(
    r"(?=.*[\w)]!)(?!.*!!)(?:\d++(?:\.\d++)?+|(?<![A-Za-z])[A-Za-z](?![A-Za-z])|[-+*/^()!]| (?! ))++", re.ASCII
)
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus)(?![A-Za-z])|[∪∩]")
_NAMED = re.compile(r"\A.*(?:=|∈|\\in(?![A-Za-z]))")
"""The name of a list before it."""
_EMPTY_SET = re.compile(r"∅|\\(?:emptyset|varnothing)")
_CONGRUENCE = re.compile(
    r"(?:(?P<name>[A-Za-z]) ?(?:\\equiv(?![A-Za-z])|≡) ?)?(?P<rest>-?\d{1,30}) ?"
    r"(?:\\pmod ?(?:\{ ?(?P<braced>\d{1,30}) ?\}|(?P<bare>\d{1,30}))"
    r"|\( ?(?:\\?mod|\\bmod|\\(?:text|mathrm|operatorname) ?\{ ?mod ?\}) ?\{? ?(?P<plain>\d{1,30}) ?\}? ?\))"
)


def last_answer(text: str) -> str | None:
    """The expression, the numbers or the congruence that a reply without a box ends with; None for any other end, such
    as a number alone."""
    end = text[-END:]
    tagged = _LAST_TAG.search(end)
    if tagged is not None:
        return _answer(tagged[2], whole=True)
    if (ratio := ratio_in_words(end)) is not None:
        return ratio
    several = _SEVERAL.search(end)
    if several is not None:
        return f"{several['first']}, {several['last']}" if several["not"] is None else None
    starts = [found.end() for found in _BEFORE.finditer(end.rstrip())]
    return _answer(end[max(starts, default=0) :].strip(" \n*_`."), whole=not starts)


def ratio_in_words(text: str) -> str | None:
    """The ratio with which a text ends, ``3 to 2`` as ``3:2``, and a range as it is; None for any other end."""
    found = _RATIO.search(text)
    return None if found is None else f"{found['first']}{' to ' if found['range'] else ':'}{found['last']}"


def _answer(text: str, *, whole: bool) -> str | None:
    """A text that is one answer which needs no words; None for any other. Where it is not the ``whole`` reply, an
    exclamation mark at its end is that of the sentence."""
    text = text.strip().removesuffix(".").strip()
    if _EMPTY_SET.fullmatch(text):
        return text
    if _FACTORIAL.fullmatch(text) and (whole or not text.endswith("!")):
        return text
    several = _SEVERAL.fullmatch(text)
    if several is not None:
        return f"{several['first']}, {several['last']}"
    if congruence(text) is not None:
        return text
    parts = _WORD.split(text)
    relations = len(parts) > 1 and all(re.search(r"[<>≤≥]", part) for part in parts)
    listed = all(map(_LISTED.fullmatch, parts if relations else [text]))
    if listed and _OF_SEVERAL.search(text) and not _THOUSANDS.fullmatch(text):
        text = re.sub(r"[<>!]=", lambda found: _RELATIONS[found[0]], text)
        return re.sub(r"\{(.*)\}", r"\\{\1\\}", text) if text.startswith("{") and text.endswith("}") else text
    value = _ASSIGNED.sub("", text, count=1) if _ASSIGNED.match(text) else text
    if not _EXPRESSION.fullmatch(value) or not re.search("[A-Za-zπ√]", value) or value.count("{") != value.count("}"):
        return None
    return value if _OPERATION.search(value) or re.fullmatch("[a-z]", value) else None


def brackets(text: str) -> str:
    """The brackets around several values, such as ``(]``; "" for a text that is no such list, or is more than one."""
    text = re.sub(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\s", "", text)
    text = re.sub(r"\\\}|\\rbrace(?![A-Za-z])", "}", re.sub(r"\\\{|\\lbrace(?![A-Za-z])", "{", text))
    depth, several = 0, False
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        several |= depth == 1 and char == ","
        if depth <= 0:
            return text[0] + char if several and at == len(text) - 1 and text[0] in "([{" else ""
    return ""


def lists(text: str) -> bool:
    """Whether a text is values in brackets with commas between them, or a union of such lists, also after a name."""
    text = text.strip(" $")
    return any(all(map(brackets, _SET_OPERATION.split(one))) for one in (text, _NAMED.sub("", text)))


def congruence(text: str) -> tuple[str, int, int] | None:
    r"""The variable, "" for none, the residue and the modulus of ``x \equiv 3 \pmod 7``; None for any other text."""
    found = _CONGRUENCE.fullmatch(" ".join(re.sub(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " ", text).split()))
    if found is None:
        return None
    modulus = int(found["braced"] or found["bare"] or found["plain"])
    return (found["name"] or "", int(found["rest"]) % modulus, modulus) if modulus else None


def congruent(one: tuple[str, int, int] | None, other: tuple[str, int, int] | None) -> bool:
    """Whether two congruences have the same solutions; a variable may be missing."""
    if one is None or other is None:
        return False
    return one[1:] == other[1:] and (one[0] == other[0] or not (one[0] and other[0]))
