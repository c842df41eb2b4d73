r"""Numbers in prose, in LaTeX and in Markdown: those that stand alone, with their signs and groups of digits.

A number is read where its spelling and both of its neighbours are known to leave its value as it is: white space,
punctuation, quotes, brackets, wrappers of LaTeX and Markdown (``$5$``, ``\boxed{5}``, ``**5**``), currencies, per cent
signs and units. A number whose neighbours are anything else is unreadable (None): part of a fraction, a power, a
product, a range, a time, a date, a version, an ordinal, "5 million". It is better not to read a number than to read
another one, so an unreadable number is not passed over in favour of an earlier one.

Read: ``-5``, ``-$5``, ``$-5``, ``- 5`` where nothing is left of it, ``minus 5``, with any of Unicode's hyphens, dashes
and minus signs; ``1,234``, ``1{,}234``, ``1\,234``, ``1 234``, ``1'234``, ``1_234`` (groups of three, one separator);
``.5``; ``1e-5``; digits of all scripts. Numbers without digits (``½``, ``Ⅳ``, ``∞``) are
unreadable. A comma is no decimal sign: ``1,5`` is unreadable, as is ``1.234,56``.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal

from rookery.environments.verifiers.texts import SHAPELESS

WINDOW = 32
"""Characters before and after a number that may decide about it: a wrapper with a sign and a currency, or two words."""

DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d"
"""Hyphens, en dash, figure dash and minus signs: each is written for a negative number. The em dash is punctuation."""

MAGNITUDES = "十百千万億亿兆萬億仟佰拾"
"""Characters after a number that multiply it."""
_HANGUL_MAGNITUDES = "십백천만억조"
"""Characters directly after a number that multiply it; after a space they begin other words."""
ENGLISH_MAGNITUDES = "hundred|thousand|million|billion|trillion|dozen|lakh|crore"
"""English words, in the singular, that multiply the number before them."""
_MAGNITUDE_WORDS = (
    "hundreds?|thousands?|(?:b|tr|quadr|quint|sext)illions?|dozens?|lakhs?|lacs?|crores?|per ?mille?|promille"
    "|tausend|mio|mrd|tsd|mil|mille|mila|mii|mill(?:ón|ones)|bill(?:ón|ones)|m?bilh(?:ão|ões)|milh(?:ão|ões)"
    "|duizend|tusen|tys|mln|mld|mlrd|bin|nghìn|ngàn|triệu|tỷ|tỉ|ribu|juta|triliun|libo(?:ng)?|(?-i:k|K|M|MM|bn|tn|B)"
)
_MAGNITUDE_STEMS = (
    "mil+i[oó](?!naire)|bil+i[oó](?!naire)|mil+i?[aá]rd|mil[iy]ar(?!y)|milyon|miljo|miljar|biljo|milij[uoa]"
    "|tysi|tis[ií]c|tisuć|tisoč|hiljad|tusind|tuhat|tuhan|ezer|ezret|tūkst|þúsund"
    "|тыс|тисяч|миллион|мільйон|миллиард|мільярд|млн|млрд|трлн|хиляд|хиљад|χιλιάδ|εκατομμύρι|δισεκατομμύρι"
    "|हज़ार|हजार|लाख|करोड़|कोटी|अरब|सौ(?!\\w)|হাজার|লাখ|লক্ষ|কোটি|ألف|آلاف|مليون|ملايين|مليار|هزار|میلیون|میلیارد"
    "|ہزار|لاکھ|کروڑ|ஆயிர|லட்ச|கோடி|వేల|లక్ష|కోట్ల|હજાર|લાખ|કરોડ|ਹਜ਼ਾਰ|ਲੱਖ|ਕਰੋੜ"
    "|אלף|אלפים|מיליון|מיליארד|พัน|หมื่น|แสน|ล้าน"
)
"""Words after a number that multiply it, in the languages that models write, and beginnings of such words."""
_NUMBER_WORD = (
    "(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    "|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand)"
)
_PARTS = (
    "(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+teenth|[a-z]+tieth|hundredth"
    "|thousandth|[mb]illionth)s?"
)
"""Words after a number of which it counts the parts."""
_RATIO_WORDS = "分之|分の|분의"
"""Words between the denominator and the numerator of a fraction."""
_OPERATORS = "✕✖⨯⨉∙∶➕➖➗"
"""Signs of operations that look like those of mathematics, or are theirs under another code."""

_SEPARATOR = r"(?:,|\{,\}|,\\!|\{\\,\}|\\[,;: ]| |'|’|_)"
_DIGITS = rf"(?:[1-9]\d{{0,2}}(?P<group>{_SEPARATOR})\d{{3}}(?!\d)(?:(?P=group)\d{{3}}(?!\d))*|\d+)"
_NUMBER = rf"(?:{_DIGITS}(?:\.(?:\d+|(?=[eE][-+]?\d)))?|(?<![\w.)\]}}])\.\d+)(?:[eE][-+]?\d{{1,3}}(?!\d))?"
_TOKEN = re.compile(_NUMBER, re.ASCII)
_PLAIN = re.compile(rf"(?P<sign>[-+])? ?(?P<number>{_NUMBER})", re.ASCII)
_LIST = re.compile(r"(?<![\d.,])\d+(?:,\d+){2,}(?![\d,]|\.\d)", re.ASCII)
"""Numbers joined by two or more commas: a list, unless they are groups of digits."""
_GROUPS = re.compile(r"\d{1,3}(?:,\d{2,3})*,\d{3}", re.ASCII)
"""Groups of three digits, or of two as in India: 12,34,567."""
_SHORT_GROUP = re.compile(r"\d{1,3},\d{3},", re.ASCII)
"""The beginning of a list that may be groups of digits with an error: 1,234,56. In brackets it is a list."""
_ENTITY = re.compile(r"&(?:#\w{1,8}|[A-Za-z]\w{1,30});", re.ASCII)
"""A character as HTML writes it: &minus;"""
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_STRUCK = re.compile(
    r"(?<!\d)~~(?=\S)[^~\n]{1,80}(?<=\S)~~(?!\d)|<(?P<tag>del|s|strike)>[^<>\n]{0,80}</(?P=tag)>", re.IGNORECASE
)
"""A part of a text that is struck out."""
_RAISED = re.compile(r"<(su[pb])>(?=[-+]?\w)|</su[pb]>", re.IGNORECASE)
"""The beginning of a power or of an index in HTML, and its end."""
_SCRIPTS = {"sup": "^", "sub": "_"}
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,80}>|<\|[^<>|\n]{1,40}\|>|<<[^<>\n]{0,80}>>")
"""HTML, XML, special tokens that are written as text, and the calculations of GSM8K: ``$<<9*2=18>>18``."""

_TEXT_COMMANDS = r"\\(?:boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|emph|left|right)"
_CURRENCY = r"(?:(?:US|A|AU|C|CA|HK|NZ|R|S)?\\?\$|[€£¥₹₽₩₺₫₴₪฿₱₦₿¢])"
_OPENING = rf"(?:[*_`\"'“”‘’«„]|\\[(\[{{,;:! ] ?|{_TEXT_COMMANDS} ?[{{(\[] ?|[(\[{{] ?|{_CURRENCY} ?)"
_BEFORE = re.compile(rf"(?P<outer>{_OPENING}*+)(?:(?P<sign>[-+])(?P<gap> *))?(?P<inner>{_OPENING}*+)\Z")
_CLOSING = re.compile(r"(?:\*\*|__|[*_`\"'”’»“](?!\w)|\$\$?|\\[)\]}]|\\right[)\]}]|[)\]}])*")

_JOINING_WORDS = (
    r"plus|minus|times|over|to|of|out of|mod|modulo|choose|point|divided by|multiplied by|raised to|per cent of"
    r"|percent of|menos|moins|más|por|fois|sur|mal|durch|плюс|минус|из"
)
_RATIO = re.compile(r" : \d", re.ASCII)
_JOINED_BEFORE = re.compile(
    rf"(?:(?:[\d)\]}}][^\s\w]{{0,4}}|[%°]) *(?:{_JOINING_WORDS}|x|:(?<= :))|\b{_NUMBER_WORD} +(?:{_JOINING_WORDS})"
    rf"|\d *(?:{_RATIO_WORDS})|正[负負]|\b(?:hundred|thousand|[mb]illion)(?:,? and)?) *\Z",
    re.IGNORECASE,
)
_FUNCTION_BEFORE = re.compile(
    rf"\b(?:half(?: of)?|twice|double|triple|(?:root|square|cube|quarters?|{_PARTS}|log|logarithm|factorial) of"
    r"|(?:sqrt|log|ln|lg|exp|sin|cos|tan)(?:[_^](?:\{[^{}]*\}|-?\w+)|[₀-₉⁰¹²³⁴-⁹⁻])*) *\Z",
    re.IGNORECASE,
)
_JOINED_AFTER = re.compile(
    rf"(?:%|\\%)? *(?:{_JOINING_WORDS}|x)(?: *(?:-|\+|\$|\\\$|\(|\*\*)*\d| +{_NUMBER_WORD}\b)|"
    r" *(?:to the |squared|cubed|factorial|halves\b|and \d+/\d)|"
    rf" *and (?:an?|{_NUMBER_WORD})[- ](?:half|halves|quarters?|{_PARTS})\b|"
    r" *[\u4e00-\u9fff]{0,2}半(?![径徑球价價导導数數夜])| *[\uac00-\ud7af]{0,2} ?반(?!\w)|"  # and a half
    r" *\d+ ?[/⁄∕]|"  # a mixed number
    r" *e[-+]?\d|"  # an exponent
    rf" *(?:\\text ?\{{ *)?(?:(?:{_MAGNITUDE_WORDS}|{_PARTS}|st|nd|rd|th)\b|{_MAGNITUDE_STEMS})|"
    rf" *(?:{_RATIO_WORDS}|[{MAGNITUDES}])",
    re.IGNORECASE,
)
_NEGATIVE_WORD = re.compile(
    r"(?:\b(?:minus|negative|eksi|(?<!\bal )(?<!\blo )(?<!\bo )menos|(?<!\bau )(?<!\bdu )(?<!\bou )moins|(?<!\bo )meno)"
    r"|минус|мінус|(?<!正)[负負]|零下|氷点下|マイナス|마이너스|माइनस|سالب|ناقص) *\Z",
    re.IGNORECASE,
)
"""Words that make a number negative; ``al menos`` and ``au moins`` are others."""
_ACCOUNTING = re.compile(rf"\( ?{_CURRENCY}")
"""Parentheses around money: a loss in a ledger, a remark in prose."""
_SIGN_EXPECTED = re.compile(r"(?:^\s*|[=≈:(\[{,] *|\b(?:is|are|was|be|equals) *)\Z", re.IGNORECASE)
"""Text after which a dash with white space on both sides is a sign, not a dash between words."""
_COMMAND_BEFORE = re.compile(r"\\(?P<name>[A-Za-z]+) *\Z")
_COMMAND_AFTER = re.compile(r" *\\(?P<name>[A-Za-z]+|.)", re.DOTALL)
_SPACES = r"[,;:! \\]|quad|qquad|hspace|enspace|thinspace"
_KNOWN_BEFORE = re.compile(
    rf"{_SPACES}|approx|to|rightarrow|Rightarrow|implies|iff|therefore|equiv|item|displaystyle|large|Large"
)
_KNOWN_AFTER = re.compile(
    rf"{_SPACES}|[%$)\]}}\n]|text|textrm|textbf|textit|mathrm|mbox|circ|degree|right|end"
    r"|approx|Rightarrow|implies|blacksquare"
)
_OPERATOR_BEFORE = re.compile(
    rf"(?P<operand>[^\s*/^×·÷⋅∗±∓√<>≤≥≠%⁄∕+~_!={_OPERATORS}-]?)(?P<space> *)"
    rf"(?P<operator>[*/^×·÷⋅∗±∓√<>≤≥≠%⁄∕+~_!={_OPERATORS}-]+) *\Z"
)
_OPERATOR_AFTER = re.compile(
    rf" *(?:[-+*/^×·÷⋅∗±∓<>≤≥≠⁄∕%{_OPERATORS}]|[<>]=|!=)+ *[-+$(\\{{\[√]*(?:\d|[A-Za-z](?![A-Za-z])|\\[A-Za-z])"
)
_ARROWS = ("->", "=>", "-->", "==>")
_UNIT = re.compile(
    r"(?:k?m/h|m/s|[kcmµnd]m|[cmk]?m[²³]|[kmµ]?g|[cm]?[lL]|[mµn]?s|k?[WV]|[kMG]?Hz|[kMGT]B|°[CFK]?"
    r"|h|hrs?|hours?|mins?|minutes?|secs?|seconds?|days?|weeks?|months?|years?|lbs?|oz|ft|in|mi|miles|mph|kmh|kph"
    r"|cents?|dollars?|euros?|pounds?|USD|EUR|GBP|CHF|JPY|INR|pct|percent|degrees?)(?!\w)"
)
"""Units written without a space. Letters that are none of them make the number part of a name or a term: 5x, 5th, 2D.
5m may be metres or millions."""

_UNIT_POWER = re.compile(
    r"(?:[A-Za-z]{2,}|\\(?:text|mathrm|textrm|mbox) ?\{[^{}]*\}|[\d/}] ?[hms])[\^_]\{?-?\Z", re.ASCII
)
"""A unit with a power, such as cm^2, or a name with an index, such as CO_2; a power of a variable is an expression."""

_UNITS_WITH_PARTS = (
    ("years?|yrs?", "months?", "weeks?|wks?", "days?", "hours?|hrs?|h", "minutes?|mins?", "seconds?|secs?|s"),
    ("miles?|mi", "yards?|yds?", "feet|foot|ft", "inch(?:es)?|in"),
    ("kilomet(?:er|re)s?|km", "met(?:er|re)s?|m", "centimet(?:er|re)s?|cm", "millimet(?:er|re)s?|mm"),
    ("tons?|tonnes?", "kilograms?|kilos?|kg", "grams?|g"), ("pounds?|lbs?", "ounces?|oz"),
    ("dollars?|euros?|pounds?|francs?", "cents?|pence|centimes?"), ("degrees?", "minutes?", "seconds?"),
)  # fmt: skip
"""Units, each before those that are parts of it."""
_AMOUNT = re.compile(
    r"(?<=\d) ?(?:°(?= ?\d+ ?['′])|"
    + "|".join(
        rf"(?:{unit})(?:,? and|,)? (?=\d[\d.]* ?(?:{'|'.join(units[at + 1 :])})\b)"
        for units in _UNITS_WITH_PARTS
        for at, unit in enumerate(units[:-1])
    )
    + ")",
    re.IGNORECASE,
)
"""The text between two numbers that are one amount: 2 hours and 30 minutes."""
_CHANGE = re.compile(r"(?<=[$€£])( ?\d[\d,]*)(?: and |, )(?=\d\d? (?:cents?|pence)\b)")
"""An amount of money before its cents."""

_STOPS = frozenset(".,;:!?\"'“”‘’»…|&#~=≈→⇒ \t\n\r\v\f，．：；")
"""Characters after a number that end it."""
_STARTS = frozenset("=≈:;,|\"'“”‘’«#~&!?→⇒…@ \t\n\r\v\f")
"""Characters before a number that it may follow."""


class _Characters(dict[int, str | int | None]):
    """A table for ``translate`` that spells digits, dashes, spaces and full-width forms in ASCII."""

    def __missing__(self, code: int) -> str | int | None:
        char = chr(code)
        spelt: str | int | None = code
        if code in SHAPELESS:
            spelt = None
        elif char in DASHES:
            spelt = "-"
        elif code > 0x7F and unicodedata.category(char) == "Nd":
            spelt = str(unicodedata.decimal(char))
        elif code > 0x7F and unicodedata.category(char) == "Zs":
            spelt = " "
        elif char in "\x85\u2028\u2029":
            spelt = "\n"
        elif 0xFF01 <= code <= 0xFF5E and char not in "，．：；":
            spelt = chr(code - 0xFEE0)
        elif 0x1D400 <= code <= 0x1D7FF:  # the alphabets of mathematics
            spelt = unicodedata.normalize("NFKC", char)
        elif char in "\u066b\uff0e":
            spelt = "."
        elif char == "\u066c":
            spelt = ","
        self[code] = spelt
        return spelt


_CHARACTERS = _Characters()


def plain_number(text: str) -> Decimal | None:
    """The value of a text that is one number with an optional sign and nothing else; None for any other text."""
    match = _PLAIN.fullmatch(spelt_in_ascii(text).strip())
    return None if match is None else _value(match["number"], match["group"], match["sign"] == "-")


def numbers(text: str, *, backwards: bool = False) -> Iterator[Decimal | None]:
    """The numbers in a text in their order, None for an unreadable one. Digits that end a name (H2O) or a unit (cm^2)
    are none."""
    text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    text = _RAISED.sub(lambda tag: _SCRIPTS.get((tag[1] or "").lower(), ""), _STRUCK.sub(" ", spelt_in_ascii(text)))
    text = _LIST.sub(_separated, _AMOUNT.sub(_joined, _CHANGE.sub(r"\1·", _TAG.sub(" ", text))))
    found = list(_TOKEN.finditer(text))
    if not text.isascii():
        numerals = (match for match in _BEYOND_ASCII.finditer(text) if _is_numeral(text, match.start()))
        found = sorted((*found, *numerals), key=lambda match: match.start())
    for match in reversed(found) if backwards else found:
        start, end = match.span()
        if match.re is _BEYOND_ASCII:
            yield None
            continue
        before, after = text[max(0, start - WINDOW) : start], text[end : end + WINDOW]
        if _ends_name(before):
            continue
        sign = _sign(before)
        continues = "." in match[0] and after.startswith(("...", "…"))
        yield None if sign is None or continues or not _ends(after) else _value(match[0], match["group"], sign < 0)


def spelt_in_ascii(text: str) -> str:
    """The text with digits, dashes of negative numbers, spaces and full-width forms in ASCII."""
    return text if text.isascii() else text.translate(_CHARACTERS)


def _joined(found: re.Match[str]) -> str:
    """The text between two numbers of one amount, such that neither is read."""
    return f"·{found[0].strip()}·"


def _separated(found: re.Match[str]) -> str:
    """Numbers joined by commas with spaces between them, unless they are, or may be, groups of digits."""
    text = found[0]
    if _GROUPS.fullmatch(text):
        return text
    enclosed = found.string[max(0, found.start() - 1) : found.start()] in ("[", "(", "{")
    return text if _SHORT_GROUP.match(text) and not enclosed else text.replace(",", ", ")


def _is_numeral(text: str, at: int) -> bool:
    """Whether a number without digits stands here: ½, Ⅳ, ∞, but no index, and no part of a number or a name."""
    char, left = text[at], text[max(0, at - WINDOW) : at]
    if char != "∞" and unicodedata.category(char) not in ("No", "Nl"):
        return False
    last = left[-1:]
    touches = last.isnumeric() or last in tuple(")]}") or _cased(last)
    return not (touches or left.rstrip(" ")[-1:].isdigit() or unicodedata.decomposition(char).startswith("<su"))


def _value(number: str, separator: str | None, negative: bool) -> Decimal:
    value = Decimal(number.replace(separator, "") if separator else number)
    return -value if negative else value


def _ends_name(before: str) -> bool:
    """Whether the digits continue a word (H2O) or a unit (cm^2), which is no number; a command of LaTeX is no word."""
    if before.endswith(("^", "_", "{", "-")):
        return _UNIT_POWER.search(before) is not None
    return _cased(before[-1:]) and _COMMAND_BEFORE.search(before) is None


def _cased(char: str) -> bool:
    """A letter of a script with capital letters: such letters do not touch a number. Others, as in Chinese, do."""
    return bool(char) and unicodedata.category(char) in ("Lu", "Ll", "Lt")


def _sign(before: str) -> int | None:
    """1 or -1 for a number that may stand after ``before``, else None."""
    if before.rstrip(" ")[-1:].isalnum():  # the common case: a word and a space
        match = _BEFORE.match("")
    else:
        match = _BEFORE.search(before)
    assert match is not None  # it matches the empty end
    rest, wrappers = before[: len(before) - len(match[0])], match["outer"] + match["inner"]
    if wrappers.startswith(("(", "[", "{")) and (rest[-1:].isalnum() or rest.endswith(tuple(")]}^_/*-+\\"))):
        return None  # f(5), 2(5), \frac{3}{4}, x^{5}
    if _ACCOUNTING.search(wrappers):
        return None
    if match["sign"]:
        return _unary(rest, match["sign"], match["gap"])
    word = _NEGATIVE_WORD.search(rest)
    if word is not None:
        return None if _is_operand(rest[: word.start()].rstrip()) else -1
    return 1 if _starts(rest) else None


def _unary(rest: str, sign: str, gap: str) -> int | None:
    """The sign's value if it is one: not a difference, a sum, a hyphen or a dash."""
    if gap and not _SIGN_EXPECTED.search(rest):
        return None
    trimmed = rest.rstrip()
    if _is_operand(trimmed) or trimmed.endswith(tuple("%+-*/^×·÷±\\")) or _NEGATIVE_WORD.search(trimmed):
        return None
    if rest == trimmed and (trimmed[-1:].isalnum() or trimmed.endswith((".", "_", "|"))):
        return None  # a hyphen, an absolute value
    command = _COMMAND_BEFORE.search(trimmed)
    if command is not None and not _KNOWN_BEFORE.fullmatch(command["name"]):
        return None
    return -1 if sign == "-" else 1


def _is_operand(left: str) -> bool:
    """Whether a text ends with what can be the left side of an operation: a number, a bracket, a variable."""
    last = left[-1:]
    return last.isdigit() or last.isnumeric() or last in tuple(")]}") or (_cased(last) and not _cased(left[-2:-1]))


def _starts(rest: str) -> bool:
    """Whether a number without a sign may follow ``rest``."""
    if not rest:
        return True
    command = _COMMAND_BEFORE.search(rest)
    if command is not None:
        return _KNOWN_BEFORE.fullmatch(command["name"]) is not None
    if _JOINED_BEFORE.search(rest) or _FUNCTION_BEFORE.search(rest):
        return False
    operator = _OPERATOR_BEFORE.search(rest)
    if operator is not None:
        return operator["operator"].endswith(_ARROWS) or _no_operation(operator, rest)
    last, left = rest[-1], rest[-2:-1]
    if last == ".":
        return rest.endswith("..") and not rest.rstrip(".")[-1:].isdigit()
    if last == "—":
        return left.isalpha()
    if last in ":,'’，．：…" and left.isdigit():
        return False
    return last in _STARTS or (last.isalpha() and not _cased(last)) or unicodedata.category(last) in ("So", "Po", "Ps")


def _no_operation(operator: re.Match[str], rest: str) -> bool:
    """Whether the characters of an operator left of a number are something else: Markdown, an equation, a rating."""
    signs, operand = operator["operator"], operator["operand"]
    if set(signs) <= {"*", "_"}:  # emphasis that ended, or a bullet
        word = _cased(operand) or operand in tuple(":.,;!?)")
        return not operand or (word and not operator["space"] and rest[-1] == " ")
    if set(signs) <= {"=", "~"}:
        return "~" not in signs or not operand.isdigit()
    if set(signs) <= set(_OPERATORS) - {"➖"}:  # a bullet
        return not operand
    if signs == "!" or signs == "%":
        return not operand.isdigit() and rest[-1] == " "
    return False


def _ends(after: str) -> bool:
    """Whether a number may stand before ``after``."""
    if _JOINED_AFTER.match(after):
        return False
    closed = _CLOSING.match(after)
    assert closed is not None  # it matches nothing
    rest = after[closed.end() :]
    if rest.startswith(("^\\circ", "^{\\circ}")):
        return True
    if _JOINED_AFTER.match(rest) or _OPERATOR_AFTER.match(rest) or _RATIO.match(rest):
        return False
    unit = _UNIT.match(rest) or re.match(rf"%|{_CURRENCY}", rest)
    if unit is not None:
        rest = rest[unit.end() :]
        if _OPERATOR_AFTER.match(rest) or rest[:1] in tuple("^_²³/"):
            return False
        if not rest or not rest[0].isalnum():
            return True
    if not rest:
        return True
    command = _COMMAND_AFTER.match(rest)
    if command is not None:
        return _KNOWN_AFTER.fullmatch(command["name"]) is not None
    first, second = rest[0], rest[1:2]
    if first in ".,:'’，．：…" and (second.isdigit() or re.match(r"\.+\d", rest)):
        return False
    if first == "{" or (first == "," and rest.startswith(",\\!")):
        return False
    if first in _STOPS:
        if re.match(r" ?~+ ?\d", rest):
            return False  # a range, as in East Asia
        following = rest.lstrip(" ")[:1]
        return not (following and (following in "‰‱" or unicodedata.category(following) in ("No", "Nl")))
    if first in "-—":
        return not (second.isalnum() if first == "-" else second.isdigit())
    if first in MAGNITUDES or first in _HANGUL_MAGNITUDES or _cased(first) or first.isdigit():
        return False
    return first.isalpha() or (
        unicodedata.category(first) in ("So", "Po", "Pe", "Pf", "Pi") and first not in "/*\\@·‰‱′″"
    )
