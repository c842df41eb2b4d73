r"""Answers and replies as LaTeX that math-verify reads as a person does.

math-verify pastes what it gets into one expression: ``1e-05`` becomes e - 5, ``3 1/2`` becomes 2, ``101_2`` is 101,
``pi/2`` is p·i/2, ``2(3)`` is 5, and ``5 m/s`` is 5·m/s. Here both sides are written so that this does not happen:
numbers in scientific notation as decimals, mixed numbers as fractions, groups of digits without separators, names of
functions and letters, Unicode's signs, digits, fractions, powers and roots as LaTeX, units as text. A text that no rule
makes clear (:data:`_UNCLEAR`) is no answer: a row's is refused, a reply's is wrong.

math-verify also reads a word as the product of its letters, and of a text that it does not understand a part of it.
Such texts are compared as they are written (:func:`as_written`): words, sequences of capital letters, answers that
deny an equation or begin with an inequality, several lines, sets that are given by a condition, figures by their
points, derivatives with a prime, relations that it does not know. Two or three small letters stay a product: ``xy`` is
``yx``.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from typing import Any

from rookery.environments.verifiers.boxes import last_box, several_boxes, sign_of_box
from rookery.environments.verifiers.numbers import ENGLISH_MAGNITUDES, MAGNITUDES, spelt_in_ascii
from rookery.environments.verifiers.sentences import END, last_answer, ratio_in_words
from rookery.environments.verifiers.texts import decimal_of, described, visible
from rookery.environments.verifiers.units import LENGTHS, OPPOSITES, unit_of

_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.]*\w)", re.ASCII)
_GROUP = re.compile(r"(?<![\w.,^])([1-9]\d{0,2}(\{,\}|,\\!|\\[,;:! ]| |'|’)\d{3}(?:\2\d{3})*)(?![\w,]*\d)", re.ASCII)
"""Groups of digits that math-verify misreads; it reads 1,234."""
_MIXED = re.compile(r"(?<![\w.,/}^])(\d{1,9})(?: |\\[,;: ])+(\d{1,9}) ?/ ?(\d{1,9})(?![\w.,/]*\d)", re.ASCII)
_MIXED_PER_CENT = re.compile(r"(?<![\w.,/}^])(\d{1,9}) *\\[dt]?frac\{(\d{1,9})\}\{(\d{1,9})\}(?= *\\?%)", re.ASCII)
_FRACTION = re.compile(r"\\([dtc]?)frac(?![A-Za-z]) *(\{[^{}]*\}|[0-9A-Za-z]) *(\{[^{}]*\}|[0-9A-Za-z])")
_REPEATING = re.compile(
    r"(?<![\w.,^}])(\d{0,12})\.(\d{0,12})\\(?:overline|bar)(?: *\{(\d{1,12})\}| *(\d)(?!\d))(?!\d)", re.ASCII
)
"""A decimal with digits that repeat."""
_DOTTED = re.compile(
    r"(?<![\w.,^}])(\d{0,12})\.(\d{0,12})(?:\\dot *(?:\{(\d)\}|(\d))(?:(\d{0,11})\\dot *(?:\{(\d)\}|(\d)))?(?!\d)"
    r"|(?<=\d\.)\((\d{1,12})\)(?!\d))",
    re.ASCII,
)
"""A decimal with digits that repeat: with dots over the first and the last digit that repeat, or in brackets right
after the point."""
_MICRO = re.compile(r"\\mu *\\(?:text|textrm|mathrm|mbox) ?\{ *([A-Za-z]+) *\}")
_PER_CENT = re.compile(
    r"(?<=[\d)}])(?: |\\[,;: ])*"
    r"(?:\\(?:text|textrm|mathrm|mbox) ?\{ *per ?cent *\}|per ?cent(?![A-Za-z])(?! *point))",
    re.IGNORECASE,
)
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt) ?(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z]))|√ ?\(([^()]*)\)")
_BRACKETED = r"(?:\\left *)?[(\[]-?\d+(?:\.\d+)?(?:\\right *)?[)\]]"
_FACTOR = re.compile(
    rf"((?<![\w^_.\\}}])\d+(?:\.\d+)?|(?<![A-Za-z^_}}\\]){_BRACKETED})"
    rf"(?: ?(?={_BRACKETED})|(?=(?:\\left *)?\((?:-?\d|\\[dtc]?frac))|(?<=\))(?=\d))",
    re.ASCII,
)
"""A factor before one in brackets, which math-verify adds to it as to a mixed number: ``2(3)``."""
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
_GREEK = "pi|alpha|beta|gamma|delta|epsilon|theta|lambda|sigma|omega|phi|rho|tau"
_NAME = re.compile(
    rf"\\(?:operatorname|mathrm|text) ?\{{ *(?P<wrapped>{_FUNCTIONS}|{_GREEK}) *\}}"
    rf"|(?<![A-Za-z\\])(?P<bare>{_FUNCTIONS}|{_GREEK})(?![A-Za-z])"
)
"""Names of functions and of Greek letters, of which math-verify makes products of their letters."""
_BASE = re.compile(r"(?<![A-Za-z\\])log_?(\d{1,3})(?= ?\()", re.ASCII)
_INFINITY = re.compile(r"(?<![A-Za-z\\])oo(?![A-Za-z])")
_POWER = re.compile(r"(?<=[\w)\]}])\*\*(?:(-?\d+)|(?=[\w({\\]))", re.ASCII)
"""A power as programs write it."""
_STYLED = re.compile(
    r"\\(?:mathrm|mathit|mathsf|text|operatorname) ?\{ *([ie]) *\}|\\(?:mathbf|boldsymbol|bm) ?\{ *([A-Za-z]) *\}"
)
"""The imaginary unit, Euler's number and vectors, which math-verify drops from a sum as it drops other text."""
_COLOR = re.compile(r"\\(?:text)?color ?\{[^{}]*\}")
_ANGLES = re.compile(r"(?:\\(?:left|right) *)?\\(?P<side>[lr])angle(?![A-Za-z])")
_TIMES_TEN = re.compile(r"(?<=\d) ?[xX*] ?(?=10 ?\^)", re.ASCII)
_BRACED_POWER = re.compile(r"\^\{(-?\d+)\}", re.ASCII)
_POWERS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_INDICES = re.compile("[₀-₉]+")
_MINUS_WORD = re.compile(r"(?<![\d正])[负負] ?(?=\d)")
_WORDS = re.compile(r"true|false|null|none|nan|undefined", re.IGNORECASE)
"""Words that math-verify does not read, or reads as products of letters."""
_LETTERS = re.compile(
    r"(?!(?i:infinity|infty|alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau"
    r"|upsilon|phi|chi|psi|omega)\Z)(?:"
    r"[A-Z]{2,}|[A-Z][a-z]{2,}|[a-z]{4,}"
    r"|(?:He|Li|Be|Ne|Na|Mg|Al|Si|Cl|Ar|Ca|Cr|Mn|Fe|Co|Ni|Cu|Zn|Br|Ag|Sn|Ba|Au|Hg|Pb|[HBCNOFPSKI]){2,}"
    r"|(?i:no|yes|on|off|up|odd|one|two|six|ten|all|any|day|may|sun|mon|tue|wed|thu|fri|sat|red|tie|win|sin|cos|tan|log|exp|cat|dog))",
    re.ASCII,
)
"""A word or a sequence of letters, no product of variables and no symbol's name."""
_FIGURE = re.compile(
    r"\\(?:(?:measured)?angle|triangle|square|parallelogram|overline|over(?:left)?(?:right)?arrow|widehat|odot)(?![A-Za-z])"
    r" *\{? *[A-Z]{2,}"
)
"""Points that name a figure, in their order."""
_FOREIGN_RELATION = re.compile(
    r"\\(?:to|(?:long)?(?:left)?rightarrow|rightleftharpoons|iff|land|lor|neg|wedge|vee|forall|exists|parallel"
    r"|perp|nmid|sim|cong|propto|(?:sub|sup)set(?:eq)?|oplus|otimes|ll|gg|ce)(?![A-Za-z])|→"
)
"""Relations and operations that math-verify does not read."""
_TEXT = re.compile(r"[^\W\d_]+(?:(?:,? |-|['’]|\. ?|, ?| & )[^\W\d_]+)*", re.UNICODE)
_FOREIGN = re.compile(r"[^\W\d_A-Za-zΑ-Ωα-ωϑϕϵ]")
"""A letter that stands for no variable."""
_LISTING = re.compile(r",?\s*\b(?:and|or)\b\s*|\s*[,&]\s*")
_WRAPPED = re.compile(r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|mbox) *\{([^{}]*)\}")
_DENIAL = re.compile(r"\\(?:neq?|not)(?![A-Za-z])|≠")
_PRIME = re.compile(r"(?<=[A-Za-z)\]}])['′]|\\prime(?![A-Za-z])")
_MEMBER = re.compile(r"\A(?:[A-Za-z]|\\(?:theta|alpha|lambda)) *(?:\\in(?![A-Za-z])|∈) *(?=\\left *[(\[]|[(\[])")
_INTRODUCED = re.compile(r"\A\\text(?:bf|rm)? ?\{[^{}]*(?::|\bis|=) *\}(?=.)", re.DOTALL)
"""A title before an answer."""
_DECORATED = re.compile(
    r"\\(?:boldsymbol|bm|underline|framebox)\{([^{}]*)\}|\\begin\{aligned\}([^&\\]*)\\end\{aligned\}"
)
_WHOLE = re.compile(r"\A(-?\d+)\.0+\Z", re.ASCII)
_DERIVATIVE = re.compile(r"\A[A-Za-z]['′]{1,3} ?(?:\( ?[A-Za-z] ?\))? ?= ?")
"""The name of a derivative before its value."""
_INEQUALITY = re.compile(r"(?:[<>≤≥]|\\(?:[lg]eq?|[lg]t|leqslant|geqslant)(?![A-Za-z]))")
_RELATION = re.compile(rf"{_INEQUALITY.pattern}|=")
_CONDITION = re.compile(r"\\\{[^{}=:|]*(?::|\||\\mid(?![A-Za-z])|\\vert(?![A-Za-z]))")
"""The beginning of a set that is given by a condition."""
_MODULO = re.compile(r"\\(?:equiv|[pb]?mod)(?![A-Za-z])|≡|\( ?\\?mod\b|\d *\\approx *-?\d")
_BEFORE_NUMBER = re.compile(
    r"(?:\A|\A.*?[=:]) *\\(?:therefore|implies|Rightarrow|rightarrow|to)(?![A-Za-z])"
    r"|\\(?:[dtc]?frac|sqrt|times|cdot|div|pm|mp|l(?:eq?|eqslant|t)|g(?:eq?|eqslant|t)|neq?|equiv|approx|[pb]?mod|over"
    rf"|choose|[dt]?binom|{_FUNCTIONS}|lg|{_GREEK}|[a-z]*epsilon|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega"
    r"|mu|nu|xi|psi|zeta|eta|kappa|chi|hbar|infty|q?quad|[a-z]*style|[lL]arge|LARGE|[hH]uge|left|[lr]?[vV]ert|lfloor"
    r"|lceil|langle|overline|bar|dot|text[a-z]*|math(?:rm|bf|it|sf)|mbox|boldsymbol|bm|boxed|color|to)(?![A-Za-z])"
)
"""Commands that may stand before a number, which math-verify reads or which change nothing."""
_NUMBERED = re.compile(r"\\(?:mathbb *\{?[A-Z]\}?|[A-Za-z]+)(?= *\d)|(?<=\d) *(?:\\[#&_]|[@#`|])(?= *\d)")
"""A command before a number, or a sign between two."""
_EMPTY_SET = re.compile(r"\\emptyset(?![A-Za-z])|\\\{ *\\\}")
_EMPTY_SET_ALONE = re.compile(rf"(?:[^=]*(?:=|\\in(?![A-Za-z])))?[\s.,:;()]*(?:{_EMPTY_SET.pattern})[\s.,:;()]*")
"""It, and nothing else but a name before it and words."""
_WORDS_IN_TEXT = re.compile(r"\\text(?:rm|bf|it)? *\{[^{}\d]*\}")
_JOINED = re.compile(
    r",? *(?:\\(?:text|textrm|mathrm|mbox) ?\{ *(?:and|or) *\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) *"
)
"""A word or a comma between several answers."""
_ENVIRONMENT = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)
_MATHEMATICS = re.compile(r"\$(?!\s)([^$]+)(?<!\s)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_OPENING, _CLOSING = r"*_`\"'“‘«", r"*_`\"'”’»"
"""Quotes and the emphasis of Markdown."""
_DENIAL_WORDS = r"(?:\b(?:can)?not|n['’]t|\bnever)(?: be)?(?: equal)?(?: to)? *"
_DENIED = re.compile(
    rf"{_DENIAL_WORDS}(?:\$[^$]*\$|\\\(.*?\\\)|[{_OPENING}]*-?\d[\d.,/]*)[\s.!{_CLOSING}]*\Z",
    re.IGNORECASE,
)
"""The end of a reply that denies its last expression."""
_DENIED_BEFORE = re.compile(_DENIAL_WORDS + r"[-$(*`]*\d[\d.,/]*[)$*`]*[,;:.] (?=.*\d)", re.DOTALL)
"""A denial before the answer."""
_UNCLEAR_END = re.compile(
    rf"\d[\s$*_`)]*(?:\\text ?\{{ *)?(?:{ENGLISH_MAGNITUDES})s?\b[^\d]*\Z"
    r"|\d[\s$*_`)]*(?:is|was|are) (?:the )?(?:wrong|incorrect|not)\b[^\d]*\Z"
    r"|\d[\s(]*\b(?:or|and)[\s(]+(?:(?:maybe|perhaps|possibly|even|also|then) +)?[-$]*\d[\d.,/]*[\s.)!$]*\Z"
    r"|\d [a-z]+(?:,| and|, and) \d[\d.,]* [a-z]+[\s.!]*\Z|\d (?:out )?of (?:the )?\d[\d.,]*[\s.!]*\Z"
    r"|(?<![\w.,^_/])(?!\d{1,3}(?: \d{3})+\b)-?\d[\d.]* +-?\d[\d.]*[\s.!]*\Z"
    r"|\bA[.)] .*\bB[.)] .*\b[C-J][.)] \S{1,20}[\s.!]*\Z",
    re.IGNORECASE | re.ASCII,
)
"""The end of a reply with several numbers, one that is denied, or a magnitude, of which math-verify takes a number."""
_NEGATIVE = re.compile(r"(?<![\d)\]}])(?<![\d)\]}] )\b(?:minus|negative) (?=[$\\(]*\.?\d)", re.IGNORECASE)
_PHANTOM = re.compile(r"\\[hv]?phantom *\{[^{}]*\}")


def _ending(word: str) -> re.Pattern[str]:
    return re.compile(
        r"(?:(?s:.*)(?:[:：是为為选選]|\b(?i:is|answer|option|choice)\b:?)|\A)"
        rf"(?:[({_OPENING}\s]|\\\()*+({word})(?:[){_CLOSING}\s.!。！]|\\\))*\Z"
    )


_ANY_WORD = r"[^\W\d_]{1,20}"
_CHOSEN = re.compile(
    rf"(?:\A|[\n:]|\b(?i:is|answer|option|choice)\b:?)[({_OPENING}\s]*+(?P<letter>[A-J])"
    rf"(?:[{_CLOSING}]*\)[{_CLOSING}]*\.?|[{_CLOSING}]+[.:]|:) +(?P<rest>[^\n.]{{1,80}})\.?\s*\Z"
    r"|\b(?i:option|choice) \(?(?P<alone>[A-J])\)? is (?:the )?(?:correct|right|true)"
    r"(?: (?:answer|one|choice|option))?[.!]?\s*\Z"
)
"""A reply that ends with a choice and the text of the choice."""
_NAMED, _NAMED_WORD = _ending("[A-Z]{1,12}"), _ending(rf"{_ANY_WORD}(?:(?: |-|['’]){_ANY_WORD}){{0,5}}")
"""A reply that ends with a choice or a sequence of letters, and one that ends with any words."""
_EAST = "\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af"
"""Letters of languages that write no spaces."""
_TAGGED = re.compile(r"<(?P<tag>[A-Za-z]\w{0,20})>([^<>]*)</(?P=tag)>", re.ASCII)
_TITLE = re.compile(
    rf"\\text(?:bf)? ?\{{[^{{}}]*: *\}}|(?<=[A-Za-z]{{2}}:)(?=[-+]?\.?\d)|(?<=[{_EAST}][：:])(?=[-+]?\d)"
    rf"|(?<=[{_EAST}])(?=[-+]?\d)|(?<=\d)(?=[{_EAST}])(?![{MAGNITUDES}])",
    re.ASCII,
)
"""A title in LaTeX, and the place after one that a number follows without a space."""
_ORDINAL = re.compile(r"\b\d+(?:st|nd|rd|th)\b")
_QUOTED = re.compile(
    rf"((?:\A|[:=\n][*_]{{0,2}}|[A-Za-z,][*_]{{0,2}}(?=\s))\s*)(?:[{_OPENING}]{{1,4}}|(?P<bracket>\())"
    rf"([-+]?\$?\.?\d[\d.,/]*%?)(?:[{_CLOSING}]{{1,4}}|(?(bracket)\)|(?!)))"
    r"(?=[\s.!,;*_]*(?:\Z|\n|(?(bracket)(?!)|[A-Za-z])))",
    re.ASCII,
)
"""A number in quotes, emphasis or, at the end, in brackets, which is no operand."""
_PART = (
    r"(?:hal(?:f|ves)|(?:third|fourth|quarter|fifth|sixth|eighth|tenth|hundredth|thousandth)s?|squared|cubed|factorial)"
)
"""Words after a number that make it another one."""
_UNCLEAR = re.compile(
    r"\d *_"  # a base: 101_2
    r"|\d *:\d\d(?!\d)|\d\.\d+\.\d"  # a time, a version
    r"|\d{4}-\d\d?-\d|\d/\d+/\d"  # a date
    r"|(?<![_^\d])\d+(?:\s|\\[,;: !]|\\q?quad(?![A-Za-z]))+\.?\d"  # two numbers side by side
    r"|\d[\s~]*(?:\\[,;: ]|\\(?:text|mathrm|textrm|mbox) ?\{)*\s*"
    rf"(?:{ENGLISH_MAGNITUDES})"
    r"|\d(?:st|nd|rd|th)\b|\d[eE][-+]?\d|\b0[xX][0-9A-Fa-f]|\A(?:[—―➖]|\^)|\? *\d"
    r"|\d +(?!(?:and|or)\b)[A-Za-z]{2,}\.?,? +(?:and +)?\d"  # two amounts: 2 hours 30 minutes
    rf"|\d +{_PART}\b",
    re.ASCII,
)
_IN_TEXT = r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|mbox) *\{"
_SIGN_AS_TEXT = re.compile(
    rf"(?:{_IN_TEXT} *(?:[-−]|minus|negative) *\}}|\{{ *[-−] *\}}|\A(?i:minus|negative) )\s*(?=\.?\d)"
)
"""A sign that math-verify would drop as a text."""
_CHANGED = re.compile(
    rf"{_IN_TEXT}[^{{}}]*(?:(?<![A-Za-z^_{{\d.,])\d|\b(?:not|no|never|wrong|incorrect"
    r"|(?:less|fewer|greater|more|larger|smaller|higher|lower) than"
    r"|at (?:least|most)|up to|(?:or|and) (?:more|less|fewer|greater|above|below|up)|half|double|twice|triple|thrice"
    r"|minus|negative|plus|squared|cubed|factorial|roots? of|out of|between|and an?|hundred|thousand|million|dozen)\b)"
    rf"|{_IN_TEXT} *(?:st|nd|rd|th|k|bn|mn) *\}}"
    rf"|\d(?:\s|\\[,;: ])*{_IN_TEXT}[^{{}}]*\}}(?:\s|\\[,;: ])*[-+]?\.?\d"
)
"""A text in an answer that makes its number another one, or stands between two: math-verify drops it."""
_INTRODUCTION = re.compile(r"\A(?:the )?(?:final )?answer(?: is)?:? +(?=.)", re.IGNORECASE)
_PROSE = re.compile(
    r"####|<<|(?:\A|(?<=\s))(?:the|is|are|was|were|has|have|had|we|he|she|it|they|gets?|so|then|therefore|hence|thus"
    r"|because|since|there|this|that|which|needs?|takes?)(?=[\s,:])",
    re.IGNORECASE,
)
"""Words of a sentence, and the marks of GSM8K's solutions."""
_DOLLAR_PARTS = re.compile(r"(?<!\\)\$[^$]*(?<!\\)\$")
_POWER_OF_TEN = re.compile(
    r"([-+]?) ?(\d+\.\d+) ?(?:\\times|\\cdot) ?10 ?\^ ?(?=\{?([-+]?\d{1,3}))(?:\{[-+]?\d+\}|\d+)", re.ASCII
)
_MARKS = (("**", "**"), ("*", "*"), ("`", "`"), ('"', '"'), ("“", "”"))
_STOP = re.compile(r"(?<=[\w)\]}%])(?<!\\right)\.(?=\}?\Z)")
"""The full stop of a sentence, also within a last text."""

_RANGE = re.compile(r"[\d)}] ?[\u2010-\u2013] ?[\d(\\]")
"""A hyphen or an en dash between numbers: a range, and no difference."""
_SYMBOLS = str.maketrans(
    {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ",
     "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ",
     "⁄": "/", "∕": "/", "∗": "*", "∶": ":", "∙": r"\cdot ", "⟨": "(", "⟩": ")", "ℝ": r"\mathbb{R}",
     "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}", "°": r"^\circ ",
     "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "，": ",", "、": ", ", "；": ";", "：": ":", "．": ".",
     **dict.fromkeys("✕✖⨯⨉", r"\times ")}
)  # fmt: skip

_NUMBER = re.compile(r"\\boxed\{-?(\d+(?:\.\d+)?)\}", re.ASCII)

_LENGTH = "(?:" + "|".join(f"{name}(?:e?s)?" for name in sorted(LENGTHS, key=len, reverse=True)) + ")"
_GAP, _SQUARED = r"(?: |~|\\[,;:! ])", r" ?\^ ?(?:([23])(?!\d)|\{ ?([23]) ?\})"
_RAISED = re.compile(
    r"(?<=[\d)}])(?:"
    rf"{_GAP}*\\(?:text|textrm|mathrm|mbox) ?\{{{_GAP}*({_LENGTH})\.? *(?:\}}{_SQUARED}|{_SQUARED} *\}})"
    rf"|{_GAP}?(mm|cm|dm|km|in|ft|yd|mi){_SQUARED}|{_GAP}+({_LENGTH}){_SQUARED}"
    rf"|{_GAP}*(?:\\(?:text|textrm|mathrm|mbox) ?\{{ *)?(square|sq\.?|cubic|cu\.?) +({_LENGTH})\b\.? *\}}?"
    r")(?P<rest>[.$\s]*)\Z"
)
"""The unit of an area or of a volume at the end of an answer or of a reply."""
_UNIT = re.compile(
    r"(?:(?<=[\d)}])(?P<gap>(?: |\\[,;: ])*)(?P<bare>[A-Za-zµμΩ]{1,12})"
    r"|\\(?:text|textrm|mathrm|mbox) ?\{ *(?P<text>[A-Za-zµμΩ]{1,13}[23]?(?:/[a-z]{1,3}| per [a-z]+)?)\.? *"
    r"\})[\s.*$]*\Z"
)
"""The unit at the end of an answer or of a reply."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_ADJACENT = re.compile(r"[A-Za-z]|in|mi|yd|mg|ml")
"""Units that are variables right after a number, as in 3mg."""
_SYMBOL = r"(?:[kcmMµn]?(?:m|s|g|N|J|W|V|A|Pa|mol|rad|L|l|Hz)|min|hr?|ft|in|mi|yd|lb|gal|day|year|person|K)"
_AMOUNT = re.compile(
    r"(?<=[\d)}%])(?: |~|\\[,;: ])+("
    rf"{_SYMBOL}(?:[ ·*]{_SYMBOL})*(?:\^\{{?\d\}}?)?(?:/{_SYMBOL}(?:\^\{{?\d\}}?|[²³])?)+"
    rf"|(?!.*\b(?:choose|times|over|plus|minus|divided|and|or|mod|infinity|infty|inf|{_PART})\b)"
    r"(?:[a-z]+ +)*(?:[a-z]{4,}|men|man|pie|toy|way|day|deg|sec|min|am|pm)(?: +[a-z]+)*"
    r")\.?\Z"
)
"""A unit of several symbols, or words, after a number and a space at the end of an answer: ``5 m/s``, ``3 people``."""
_WITHIN_TEXT = re.compile(
    r"\\(?:text|textrm|mbox|mathrm) ?\{ *([-+]?\\?\$?\d[\d.,]*(?:/\d+)?)(?: +([A-Za-z][^{}]*))?\}", re.ASCII
)
_TEMPERATURE = re.compile(
    r" *(?:\^ ?\{? ?\\circ ?\}?|\bdegrees?) *(?:\\[,;: ])*"
    r"(?:\\(?:text|textrm|mathrm|mbox) ?\{ *(?:\\circ)? *(?P<text>[CFcf])[a-z]* *\}"
    r"|(?P<bare>[CF])(?:elsius|ahrenheit)?)\.?\Z"
)
_MONEY = re.compile(
    r"[€£¥₹₩]|\\(?:euro|pounds|yen)(?![A-Za-z])|(?<=\d) ?(?:USD|EUR|GBP|JPY|INR|CHF)\.?\Z"
    r"|\A(?:USD|EUR|GBP|JPY|INR|CHF|Rs\.?|US) ?(?=\\?\$?\d)"
)
"""Signs and codes of currencies next to a number."""
_DOLLARS = re.compile(r"\A(-?) ?\\?\$ ?(-?\d[\d,]*(?:\.\d+)?)\Z", re.ASCII)
_SPACE = r"(?:[\s.:~]|\\[,;:! ]|\\q?quad(?![A-Za-z]))"
_CHOICE = re.compile(
    r"\A(?:\\(?:text|textbf|textrm|mathrm|mathbf|mbox) ?\{ *\(?([A-J])[).:]? *(?:\}|(?<=[).:] )(?=[^{}]*\}\Z))"
    rf"|\(([A-J])\)(?={_SPACE}|\\text)|([A-J])\)(?=\s|\Z)){_SPACE}*+"
    r"((?![-+*/^=<>_&|]|\\(?:cup|cap|times|cdot|div|pm|setminus|subset|in|to|leq?|geq?|neq?|equiv)(?![A-Za-z])).*)\Z",
    re.DOTALL,
)
"""A choice at the beginning of an answer, and the text of the choice."""

LONGEST_ANSWER = 10_000
"""Characters of an answer: longer ones are no expression that a person wrote."""


def gold_latex(value: Any, field: str) -> str:
    """A row's answer as LaTeX. Raises ValueError, with ``field``, for what is no number and no clear text."""
    number = decimal_of(value)
    if number is not None:
        return rf"\boxed{{{_digits(number)}}}"
    if not isinstance(value, str) or not visible(value):
        raise ValueError(f"{field} is {described(value)}; write a number, or an expression as a text in LaTeX")
    latex = clear(value) if len(value) <= LONGEST_ANSWER else None
    if latex is None or _is_prose(latex):
        raise ValueError(
            rf"{field} is {described(value)}, which can be read in several ways; write it in LaTeX as one expression,"
            r" such as \frac{7}{2}"
        )
    return latex


def _is_prose(latex: str) -> bool:
    """Whether an answer is a text that speaks about several expressions, or has lines: math-verify would take one of
    them, or the words as products of their letters."""
    parts = _DOLLAR_PARTS.split(latex)
    if len(parts) > 2:
        return any(part.strip(" ,;.") not in ("", "and", "or") for part in parts[1:-1])
    content = _WRAPPED.sub("", _ENVIRONMENT.sub("", content_of(latex).strip()))
    several = "\n" in content or _PROSE.search(content) is not None
    return several and len(parts) < 2 and re.search(r"\d", content) is not None


def significant_digits(latex: str) -> int:
    """Digits of an answer that is a number, without the zeros around it; 0 for any other."""
    number = _NUMBER.fullmatch(latex)
    return len(number[1].replace(".", "").strip("0")) if number is not None else 0


def reply_latex(text: str, *, words: bool = False) -> str | None:
    r"""A reply as math-verify shall read it: the content of its last ``\boxed{…}`` alone, the whole text without one.
    None for a reply whose last box is empty, unfinished or unclear. With ``words`` a reply may end with any word."""
    boxed = several_boxes(text) or last_box(text)
    if boxed is None:
        denied = [found.end() for found in _DENIED_BEFORE.finditer(text, max(0, len(text) - END))]
        text = text[max(denied, default=0) :]
        end = text[-END:]
        spelt = spelt_in_ascii(end)
        named = (_NAMED_WORD if words else _NAMED).search(spelt)
        if named is not None:
            return clear(named[1])
        chosen = _CHOSEN.search(spelt)
        if chosen is not None:
            return clear(f"({chosen['letter'] or chosen['alone']}) {chosen['rest'] or ''}".strip())
        last = [one for found in _MATHEMATICS.finditer(end) for one in found.groups() if one][-1:]
        if _DENIED.search(end) or (last and as_written(rf"\boxed{{{last[0]}}}")):
            return clear(last[0]) if last and not _DENIED.search(end) else None
        answer = last_answer(spelt)
        if answer is not None:
            return clear(answer)
        if _UNCLEAR_END.search(spelt):
            return None
        text = _NEGATIVE.sub("-", text[:-END] + _bared(end))
        text = _raised(_written(_RANGE.sub(lambda found: f"{found[0][0]} to {found[0][-1]}", text)))
        return text if "$" in text or "\\" in text else _BRACED_POWER.sub(r"^\1", text)
    sign = "" if several_boxes(text) else sign_of_box(text)
    return None if sign is None else clear(sign + (ratio_in_words(boxed) or boxed))


def _bared(text: str) -> str:
    """A text without titles, ordinal numbers and what encloses its numbers, where math-verify would not find them."""
    text = _ORDINAL.sub(" ", _TITLE.sub(" ", _TAGGED.sub(r" \2 ", text)))
    return _QUOTED.sub(r"\1 \3 ", text)


def clear(text: str) -> str | None:
    r"""One answer in a ``\boxed{…}``, None where it could be read in several ways."""
    content = _DECORATED.sub(lambda found: found[1] or found[2], _PHANTOM.sub("", _unwrapped(text)))
    content = _MEMBER.sub("", _INTRODUCED.sub("", _INTRODUCTION.sub("", content)))
    content = _SIGN_AS_TEXT.sub("-", content)
    if _RANGE.search(content):
        return None
    content = _in_words(_separated(_STOP.sub("", _written(_DERIVATIVE.sub("", content), whole=True))))
    power = _POWER_OF_TEN.fullmatch(content)
    if power is not None:  # exact, where math-verify multiplies floats
        content = power[1] + _digits(Decimal(f"{power[2]}e{power[3]}"))
    content = _WHOLE.sub(r"\1", content)
    if not content:
        return None
    if "$" in content.replace("\\$", ""):  # prose around an expression, which math-verify finds
        return content
    if _UNCLEAR.search(content):
        return None
    if _WORDS.fullmatch(content):
        content = rf"\text{{{content.lower()}}}"
    return rf"\boxed{{{content}}}"


def as_written(latex: str) -> bool:
    """Whether math-verify would read an answer in a box as another one, so that its text is compared."""
    content = (last_box(latex) or "").strip()
    if (
        _is_text(_WRAPPED.sub(r"\1", content).strip())
        or _DENIAL.search(content)
        or _PRIME.search(content)
        or _FIGURE.search(content)
        or (_FOREIGN_RELATION.search(content) and r"\lim" not in content)
        or _INEQUALITY.match(content)
        or _MODULO.search(content)
        or _is_foreign_before_number(content)
        or (_EMPTY_SET.search(content) and not _EMPTY_SET_ALONE.fullmatch(_WORDS_IN_TEXT.sub("", content)))
        or (_CHANGED.search(content) and re.search(r"\d", content))
    ):
        return True
    return r"\\" in _ENVIRONMENT.sub("", content) or _CONDITION.match(_bare(content)) is not None


def _is_foreign_before_number(content: str) -> bool:
    """Whether something that math-verify leaves out stands before a number, as in 6 X 5."""
    known = {found.end() for found in _BEFORE_NUMBER.finditer(content)}
    return any(found.end() not in known for found in _NUMBERED.finditer(content))


def _is_text(content: str) -> bool:
    """Whether an answer is of words: no product of variables."""
    if _LETTERS.fullmatch(content):
        return True
    words = re.split(r"[^\w]+", content)
    return bool(_TEXT.fullmatch(content)) and any(_LETTERS.fullmatch(one) or _FOREIGN.search(one) for one in words)


def joined_relations(latex: str) -> tuple[str, list[str]]:
    """The word between relations of an answer in a box, ``and`` or ``or``, and these; "" for any other answer."""
    content = last_box(latex) or ""
    words = {re.sub(r"[^a-z]|text(?:rm)?|mathrm|mbox", "", found[0]) for found in _JOINED.finditer(content)}
    parts = _JOINED.split(content)
    if len(words) != 1 or not all(_RELATION.search(part) for part in parts):
        return "", []
    return words.pop(), parts


def contradict(latex: str, other: str) -> bool:
    """Whether the words of two answers in boxes say the opposite: 5 up is not 5 down."""
    directions = [
        dict(OPPOSITES[word] for word in re.findall("[a-z]+", content.lower()) if word in OPPOSITES)
        for content in (last_box(latex) or "", last_box(other) or "")
    ]
    return any(directions[0][axis] != directions[1][axis] for axis in directions[0].keys() & directions[1].keys())


def content_of(latex: str) -> str:
    """The text in the box of an answer; the whole text of one without."""
    return last_box(latex) or latex


def same_text(latex: str, other: str) -> bool:
    """Whether two answers in boxes are written alike. Spaces, capitals of words, the spelling of a relation and the
    order of words in a list do not count."""
    return _bare(content_of(latex)) == _bare(content_of(other)) or _listed(latex) == _listed(other) != [""]


def _listed(latex: str) -> list[str]:
    """The parts of a list of words; [""] for another answer."""
    content = _WRAPPED.sub(r"\1", content_of(latex)).strip()
    return sorted(map(_bare, _LISTING.split(content))) if _is_text(content) else [""]


def without_unit(latex: str) -> tuple[str, str, Fraction]:
    """An answer without its unit, the measure of the unit and its size; "" for an answer without one that is known."""
    box = last_box(latex)
    found = _UNIT.search(latex[-END:] if box is None else box)
    if found is None or (not found["gap"] and _ADJACENT.fullmatch(found["bare"] or "")):
        return latex, "", Fraction(1)
    unit = unit_of(found["bare"] or found["text"], enclosed=found["bare"] is None)
    variables = box is not None and found["bare"] and re.search("[A-Za-z]", _COMMAND.sub("", box[: found.start()]))
    if unit is None or variables:
        return latex, "", Fraction(1)
    return (latex if box is None else rf"\boxed{{{box[: found.start()]}}}"), *unit


def _bare(content: str) -> str:
    """LaTeX without wrappers of text and spaces, each relation spelt in one way."""
    content = _WRAPPED.sub(r"\1", content)
    content = re.sub(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\(?:quad|qquad)(?![A-Za-z])|\\[,;:! ]", "", content)
    content = re.sub(r"\\neq(?![A-Za-z])|\\not *=|≠", r"\\ne ", content)
    content = re.sub(r"\\leq?(?:slant)?(?![A-Za-z])|≤|\\leqslant", r"\\le ", content)
    content = re.sub(r"\\geq?(?:slant)?(?![A-Za-z])|≥|\\geqslant", r"\\ge ", content)
    content = re.sub(r"\\[lg]t(?![A-Za-z])", lambda found: "<" if found[0] == r"\lt" else ">", content)
    content = re.sub(r"\\(?:mid|vert)(?![A-Za-z])|\|", ":", content)
    content = "".join(content.split())
    return content.casefold() if re.fullmatch(r"(?:[^\W\d_]|[-'’&,.]){2,}", content) else content


def _unwrapped(text: str) -> str:
    """The text without what encloses a single expression: dollars, brackets of LaTeX, boxes, Markdown."""
    text = text.strip()
    boxed = last_box(text)
    if boxed is not None:
        text = boxed.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), *_MARKS):
        inner = text[len(opening) : -len(closing)]
        enclosed = inner and text.startswith(opening) and text.endswith(closing)
        if enclosed and opening not in inner and not inner.endswith("\\"):
            text = inner.strip()
    if text.count("$") - text.count("\\$") == 1:  # an amount of money
        text = text.replace("$", "\\$").replace("\\\\$", "\\$")
    return text


def _in_words(content: str) -> str:
    """An answer whose units are text, which math-verify leaves out."""
    content = _WITHIN_TEXT.sub(lambda found: found[1] + (rf"\text{{ {found[2]}}}" if found[2] else ""), content)
    content = _raised(_MONEY.sub("", _DOLLARS.sub(r"\1\2\\text{ dollar}", content)).strip())
    if (found := _TEMPERATURE.search(content)) is not None:
        scale = "celsius" if (found["text"] or found["bare"]).upper() == "C" else "fahrenheit"
        return rf"{content[: found.start()]}\text{{ {scale}}}"
    return _AMOUNT.sub(lambda found: rf"\text{{ {found[1]}}}", content)


def _raised(content: str) -> str:
    r"""The text with the unit of an area or a volume at its end in one form: ``\text{ cm2}``."""
    found = _RAISED.search(content)
    if found is None:
        return content
    *parts, word, named, rest = found.groups()
    given = [part for part in parts if part is not None] or [named, "2" if word.startswith("sq") else "3"]
    spelt = (given[0], given[0].removesuffix("es"), given[0].removesuffix("s"))
    unit = next(name for name in spelt if name in LENGTHS)
    return rf"{content[: found.start()]}\text{{ {unit}{given[1]}}}{rest}"


def _separated(content: str) -> str:
    """Several answers with commas between them: ``5 and 6``, not where words or relations stand there."""
    if _JOINED.search(content) is None:
        return content
    parts = _JOINED.split(content)
    others = " ".join(parts)
    words = re.search(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", "", others))
    related = re.search(r"[<>≤≥]|\\(?:[lg]eq?|[lg]t|text)(?![A-Za-z])", others)
    if words or related or not all(part.strip() for part in parts):
        return content
    return ", ".join(part.strip() for part in parts)


_NO_LIST = re.compile(
    r"\\pm|±|\\text|\\cup|[<>≤≥]|\\[lg]eq?(?![A-Za-z])|[\[({][^\])}]*[,;]|\d{1,3}(?:,\d{3})+(?![\d,])"
)


def differ_in_count(latex: str, other: str) -> bool:
    """Whether two lists without brackets have another number of values, or the same ones at other times: math-verify
    compares them as sets."""
    contents = last_box(latex), last_box(other)
    if not all(content and not _NO_LIST.search(content) for content in contents):
        return False
    one, two = (Counter(map(_bare, re.split("[,;]", content or ""))) for content in contents)
    return one.total() != two.total() or (one.keys() == two.keys() and one != two)


def sides(latex: str) -> list[str]:
    """The sides of an equation without variables in a box; none for any other answer."""
    content = last_box(latex) or ""
    parts = re.split(r"(?<![<>!≠:=])=(?!=)", content)
    if len(parts) < 2 or re.search(r"[A-Za-z]", _COMMAND.sub("", content)) or not all(part.strip() for part in parts):
        return []
    return parts


def split_choice(latex: str) -> tuple[str, str]:
    """The letter of a choice that an answer in a box begins with, and the rest: ``(D) 12``. "" for one without."""
    box = last_box(latex) or ""
    if (alone := re.fullmatch(r"\(?([A-J])\)?", _bare(box))) is not None:
        return alone[1], ""
    found = _CHOICE.match(box)
    return ("", box) if found is None else (found[1] or found[2] or found[3], found[4].strip())


def _written(text: str, *, whole: bool = False) -> str:
    """The text with every number as digits and a point, and Unicode's mathematics as LaTeX. ``whole``: it is one
    answer, in which powers and names are those of mathematics."""
    text = _ANGLES.sub(lambda found: "(" if found["side"] == "l" else ")", _COLOR.sub("", spelt_in_ascii(text)))
    text = _MINUS_WORD.sub("-", text)
    text = _STYLED.sub(lambda found: found[1] or found[2], _TIMES_TEN.sub(r"\\times ", text))
    if whole and not re.fullmatch(_FUNCTIONS, _WRAPPED.sub(r"\1", text)):
        text = _BASE.sub(r"\\log_{\1}", _INFINITY.sub(r"\\infty", _POWER.sub(_power, text)))
        text = _NAME.sub(lambda found: rf"\{found['wrapped'] or found['bare']} ", text)
    if not text.isascii():
        text = _POWERS.sub(
            lambda found: f"^{{{unicodedata.normalize('NFKC', found[0]).replace(chr(0x2212), '-')}}}", text
        )
        text = _INDICES.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
        text = "".join(_fraction(char) for char in text).translate(_SYMBOLS)
    text = _FACTOR.sub(r"\1\\cdot ", text)
    text = _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)
    text = _FRACTION.sub(lambda found: rf"\{found[1]}frac{{{found[2].strip('{}')}}}{{{found[3].strip('{}')}}}", text)
    text = _DOTTED.sub(_dotted, _MICRO.sub(r"\\text{ µ\1}", text))
    text = _REPEATING.sub(_repeated, text.replace("~", " ").replace(r"\varnothing", r"\emptyset"))
    text = _MIXED.sub(_improper, _MIXED_PER_CENT.sub(_improper, _PER_CENT.sub("%", text)))
    text = _GROUP.sub(lambda found: found[1].replace(found[2], ""), text)
    return _SCIENTIFIC.sub(lambda found: _digits(Decimal(found[0])), text).strip()


def _digits(number: Decimal) -> str:
    """A number without an exponent."""
    whole = number == number.to_integral_value()
    return f"{number.quantize(Decimal(1)) if whole and number.adjusted() < 25 else number:f}"


def _power(found: re.Match[str]) -> str:
    return f"^{{{found[1]}}}" if found[1] else "^"


def _fraction(char: str) -> str:
    """½ as LaTeX, any other character as it is."""
    top, slash, bottom = unicodedata.normalize("NFKC", char).partition("⁄") if char > "\x7f" else ("", "", "")
    return rf"\frac{{{top}}}{{{bottom}}}" if slash and top and bottom else char


def _repeated(found: re.Match[str]) -> str:
    """A repeating decimal as an exact fraction."""
    return _as_fraction(found[1], found[2], found[3] or found[4])


def _as_fraction(whole: str, start: str, period: str) -> str:
    top = int(whole + start + period) - int(whole + start or "0")
    return rf"\frac{{{top}}}{{{10 ** len(start) * (10 ** len(period) - 1)}}}"


def _dotted(found: re.Match[str]) -> str:
    """As :func:`_repeated`."""
    whole, start, *digits = found.groups(default="")
    return _as_fraction(whole, start, "".join(digits))


def _improper(found: re.Match[str]) -> str:
    whole, top, bottom = map(int, found.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"
