"""Numbers in prose: a table of spellings, and properties of what is written around a number."""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.environments.verifiers.numbers import DASHES, numbers, plain_number

SPELLINGS: list[tuple[str, list[float | None]]] = [
    ("-$5", [-5]),
    ("The balance is -$5.", [-5]),
    ("The answer is –5", [-5]),
    ("The answer is ‑5", [-5]),
    ("$1{,}234$", [1234]),
    ("3/4", [None, None]),
    ("1.5 x 10^8", [None, None, None]),
    ("1 234 567", [1234567]),
    ("- 5", [-5]),
    ("12 + 30 = 42", [None, None, 42]),
    ("42 it is, not 41", [42, 41]),
    ("41, 42, 43", [41, 42, 43]),
    ("41,42,43", [41, 42, 43]),
    ("The answer is 42", [42]),
    ("42.0", [42.0]),
    ("0-42", [None, None]),
    ("4.2e1", [42]),
    ("It is 1,234,567.", [1234567]),
    ("1,2", [None, None]),
    ("It is .5", [0.5]),
    ("x = -.5", [-0.5]),
    ("version 1.2.3", [None, None]),
    ("wait...7", [7]),
    ("x = −3", [-3]),
    ("2^10", [None, None]),
    ("2**10", [None, None]),
    ("1e5", [100000]),
    ("50%", [50]),
    ("50\\%", [50]),
    ("3-5", [None, None]),
    ("3–5", [None, None]),
    ("3 - 5", [None, None]),
    ("12:30", [None, None]),
    ("2024-01-02", [None, None, None]),
    ("5th", [None]),
    ("5x", [None]),
    ("5 km", [5]),
    ("5km", [5]),
    ("$5$", [5]),
    ("\\(5\\)", [5]),
    ("\\[ 5 \\]", [5]),
    ("\\boxed{5}", [5]),
    ("\\boxed{-5}", [-5]),
    ("\\boxed{\\text{5}}", [5]),
    ("\\text{5}", [5]),
    ("**5**", [5]),
    ("**-5**", [-5]),
    ("__5__", [5]),
    ("*5*", [5]),
    ("`5`", [5]),
    ("(5)", [5]),
    ("(-5)", [-5]),
    ("($5)", [None]),
    ("５", [5]),
    ("٥", [5]),
    ("١٬٢٣٤", [1234]),
    ("+5", [5]),
    ("5.", [5]),
    ("5,", [5]),
    ("5 million", [None]),
    ("5 thousand dollars", [None]),
    ("$5M", [None]),
    ("5k", [None]),
    ("5万", [None]),
    ("5元", [5]),
    ("答案是5。", [5]),
    ("\\frac{3}{4}", [None, None]),
    ("\\frac34", [None]),
    ("\\sqrt{16}", [None]),
    ("x^{10}", [None]),
    ("x_{5} = 7", [None, 7]),
    ("$x^2 = 9$", [None, 9]),
    ("H2O", []),
    ("x1", []),
    ("minus 5", [-5]),
    ("is negative 5", [-5]),
    ("10 minus 5", [None, None]),
    ("10 minus 5 is 5", [None, None, 5]),
    ("10 -5", [None, None]),
    ("x -5", [None]),
    ("x-5", [None]),
    ("a 5-year plan", [None]),
    ("3 1/2", [None, None, None]),
    ("3½", [None]),
    ("3 ½", [None]),
    ("10²", [None]),
    ("1.234,56", [None, None]),
    ("1.234.567", [None, None]),
    ("1'234'567", [1234567]),
    ("1_000", [1000]),
    ("1,234.56", [1234.56]),
    ("12,34,567", [None, None]),
    ("5! is", [5]),
    ("<b>5</b>", [5]),
    ("<answer>5</answer>", [5]),
    ("x > 5", [None]),
    ("x <= 5", [None]),
    ("-> 5", [5]),
    ("=> 5", [5]),
    ("→ 5", [5]),
    ("#### 42", [42]),
    ("####42", [42]),
    ("#5", [5]),
    ("Step 1: 5", [1, 5]),
    ("**Answer:** 5", [5]),
    ("**Answer** 5", [5]),
    ("Answer:5", [5]),
    ('{"answer": 5}', [5]),
    ('{"answer":-5}', [-5]),
    ("f(5)", [None]),
    ("2(5)", [None, None]),
    ("(5)(6)", [None, None]),
    ("(5)^2", [None, None]),
    ("5 of 10", [None, None]),
    ("3 out of 4", [None, None]),
    ("20% of 50", [None, None]),
    ("20% of 50 is 10", [None, None, 10]),
    ("10 % 3", [None, None]),
    ("10 to 20", [None, None]),
    ("6 times 7 is 42", [None, None, 42]),
    ("He went 5 times.", [5]),
    ("5 squared", [None]),
    ("±5", [None]),
    ("5 ± 1", [None, None]),
    ("+/-5", [None]),
    ("--5", [None]),
    ("The answer —5", [None]),
    ("answer—5", [5]),
    ("5—that is it", [5]),
    ("x = - 5", [-5]),
    ("The answer is - 5", [-5]),
    ("The answer - 5", [None]),
    ("- 5\n- 6", [-5, None]),
    ("US$5", [5]),
    ("-US$5", [-5]),
    ("€5", [5]),
    ("5€", [5]),
    ("5 €", [5]),
    ("-€5", [-5]),
    ("$-5", [-5]),
    ("$-5$", [-5]),
    ("-$5$", [-5]),
    ("$\\$5$", [5]),
    ("\\$5", [5]),
    ("-\\$5", [-5]),
    ("$ 5", [5]),
    ("5°C", [5]),
    ("5^\\circ", [5]),
    ("5\\text{ km}", [5]),
    ("5\\,\\text{km}", [5]),
    ("5\\text{th}", [None]),
    ("5\\text{ million}", [None]),
    ("5 \\times 3", [None, None]),
    ("5 \\cdot x", [None]),
    ("\\approx 5", [5]),
    ("\\times 5", [None]),
    ("1,2345", [None, None]),
    ("1 2345", [1, 2345]),
    ("12 34 56", [12, 34, 56]),
    ("2020 300", [2020, 300]),
    ("007", [7]),
    ("0x1F", [None]),
    ("5e", [None]),
    ('"5"', [5]),
    ("'5'", [5]),
    ("5?", [5]),
    ("5;6", [5, 6]),
    ("3:4", [None, None]),
    ("3 : 4", [None, None]),
    ("8/10", [None, None]),
    ("5/day", [None]),
    ("60 km/h", [60]),
    ("60km/h", [60]),
    ("5'4", [None, None]),
    ("5 - the answer", [5]),
    ("x=5", [5]),
    ("x = 5y", [None]),
    ("5 x 3", [None, None]),
    ("5x3", [None]),
    ("5×3", [None, None]),
    ("5·3", [None, None]),
    ("5 * 3", [None, None]),
    ("* 5", [5]),
    ("1. 5", [1, 5]),
    ("a,5", [5]),
    ("(3, -5)", [3, -5]),
    ("[1, 2]", [1, 2]),
    ("1{,}2", [None, None]),
    ("5🎉", [5]),
    ("\\boxed{1,234}", [1234]),
    ("\\boxed{1\\,234}", [1234]),
    ("\\boxed{5\\%}", [5]),
    ("-5", [-5]),
    (" -5", [-5]),
    ("\n-5", [-5]),
    ("−$1,234.50", [-1234.50]),
    ("-(5)", [-5]),
    ("1⁄2", [None, None]),
    ("5.0e-3", [0.0050]),
    ("5 percent", [5]),
    ("5 percent of 20", [None, None]),
    ("$5$ - $3$", [None, None]),
    ("$$5$$", [5]),
    ("＋５", [5]),
    ("－５", [-5]),
    ("3，5", [None, None]),
    ("3；5", [3, 5]),
    ("5 5/6", [None, None, None]),
    ("10^{-3}", [None, None]),
    ("\\left(5\\right)", [5]),
    ("5\\pi", [None]),
    ("\\pmod{7}", [None]),
    ("5 (five)", [5]),
    ("five (5)", [5]),
    ("You need 5.", [5]),
    ("1..5", [None, None]),
    ("5:", [5]),
    ("C++5", [None]),
    ("6 - 2", [None, None]),
    ("6 −2", [None, None]),
    ("5 | 6", [5, 6]),
    ("9 * 2 = $<<9*2=18>>18 every day", [None, None, 18]),
    ("half of 18", [None]),
    ("the square root of 16", [None]),
    ("sqrt 16", [None]),
    ("5 choose 2", [None, None]),
    ("5 tenths", [None]),
    ("1.5 e8", [None]),
    ("5 each", [5]),
    ("5 eggs", [5]),
    ("5~10", [None, None]),
    ("5 ~ 10", [None, None]),
    ("5…10", [None, None]),
    ("$5-$10", [None, None]),
    ("$5 to $10", [None, None]),
    ("5 <= x <= 10", [None, None]),
    ("C(5,2)", [None, None]),
    ("5C2", [None]),
    ("18\\ \\text{cm}^2", [18]),
    (r"\boxed{18 \text{ eggs}}", [18]),
    (r"\boxed{\mathbf{18}}", [18]),
    (r"\boxed{$18}", [18]),
    (r"\boxed{x=18}", [18]),
    (r"$\frac{36}{2} = 18$", [None, None, 18]),
    (r"$36 \div 2 = 18$", [None, None, 18]),
    ("$$\n\\boxed{18}\n$$", [18]),
    ("| Total | 18 |", [18]),
    ("```\n18\n```", [18]),
    ("eighteen (18)", [18]),
    ("18's", [18]),
    ("-18°C", [-18]),
    ("-18$", [-18]),
    ("negative $5", [-5]),
    ("5 of the 20 students", [5, 20]),
    ("共18个苹果", [18]),
    ("18円です", [18]),
    ("18 cm^2", [18]),
    (r"18\text{ cm}^2", [18]),
    (r"9.8 \mathrm{m/s}^{2}", [9.8]),
    ("9.8 m/s^2", [9.8]),
    ("5 m^3", [5]),
    ("y = x^2", [None]),
    ("e^5", [None]),
    ("₹1,00,000", [None, None, None]),
    ("101₂", [None]),
    ("555-1234", [None, None]),
    ("GPT-4", [None]),
    ("6:30 pm", [None, None]),
    ("10⁸", [None]),
    ("5-dollar", [None]),
    ("1.000.000", [None, None]),
    ("|-5|", [None]),
    ("5-6=-1", [None, None, -1]),
    ("2+3=5.", [None, None, 5]),
    ("x=2,y=3", [2, 3]),
    ("~$5", [5]),
    ("$3.50/lb", [None]),
    ("5<|im_end|>", [5]),
    ("1，234", [None, None]),
    ("18+", [None]),
    ("5 - I mean 6", [None, 6]),
    ("5 x", [5]),
    ("第5", [5]),
    ("1 234,56", [None, None]),
    ("-1,234,567.89", [-1234567.89]),
    ("1,234.5.6", [None, None]),
    ("1\N{NO-BREAK SPACE}234", [1234]),
    ("1\N{NARROW NO-BREAK SPACE}234", [1234]),
    ("1\N{THIN SPACE}234", [1234]),
    ("1\N{ZERO WIDTH SPACE}234", [1234]),
    ("\N{DEVANAGARI DIGIT FIVE}", [5]),
    ("There are 6 slices. The answer is ½.", [6, None]),
    ("The answer is ∞", [None]),
    ("答案是½", [None]),
    ("chapter Ⅳ", [None]),
    ("18 cm²", [18]),
    ("x² and ½", [None]),
    ("x = \\log_2 5", [None]),
    ("\\log_{10} 5", [None]),
    ("\\sin^2 5", [None]),
    ("log₂ 5", [None]),
    ("The answer is 5.e3", [5000]),
    ("It costs $1,234,56", [None, None]),
    ("[3,100,20]", [3, 100, 20]),
    ("&minus;5", [-5]),
    ("&#53;", [5]),
    ("5&nbsp;km", [5]),
    ("A&B 5", [5]),
]


IN_WORDS: list[tuple[str, list[float | None]]] = [
    ("答案是负5", [-5]), ("答案是負5。", [-5]), ("答えはマイナス5です", [-5]),
    ("답은 마이너스 5입니다", [-5]), ("Ответ: минус 5", [-5]),
    ("La respuesta es menos 5", [-5]), ("al menos 5", [5]), ("por lo menos 5", [5]), ("más o menos 5", [5]),
    ("au moins 5", [5]), ("La réponse est moins 5", [-5]), ("10 menos 5", [None, None]),
    ("10 moins 5 font 5", [None, None, 5]), ("正负5", [None]), ("零下5度", [-5]), ("उत्तर माइनस 5 है", [-5]),
    ("5 लाख", [None]), ("5 करोड़", [None]), ("5 миллионов", [None]), ("5 млн", [None]),
    ("5 тыс. рублей", [None]), ("5만", [None]), ("5억 원", [None]), ("5개", [5]), ("5 만약", [5]),
    ("5 milliards", [None]), ("5 millones", [None]), ("5 quadrillion", [None]), ("5 Tausend", [None]),
    ("5 triệu", [None]), ("5 مليون", [None]), ("5 bins", [5]), ("5 miles", [5]),
    ("5 sixths", [None]), ("5 eighths", [None]), ("3 twelfths", [None]), ("5 fourths", [None]),
    ("3 quarters", [3]), ("5 months", [5]), ("5 sixteenths", [None]), ("two-thirds of 18", [None]),
    ("three out of 5", [None]), ("3 out of five", [None]), ("two times 18", [None]), ("5 plus six", [None]),
    ("two plus 5", [None]), ("two point 5", [None]), ("He comes 5 often", [5]), ("5 tone", [5]),
    ("5 x one", [None]), ("one 5", [5]), ("5 to one", [None]), ("5 ✕ 3", [None, None]), ("5✖3", [None, None]),
    ("5 ∶ 3", [None, None]), ("5∶3", [None, None]), ("5 ∙ 3 = 15", [None, None, 15]), ("∙ 5", [5]),
    ("✖ 5", [5]), ("➖5", [None]), ("5 ➕ 3", [None, None]), ("5分之3", [None, None]), ("百分之5", [5]),
    ("5分の3", [None, None]), ("5분의 3", [None, None]), ("5 ‰", [None]), ("5‰", [None]), ("用了5分", [5]),
    ("5 half-lives", [5]), ("5 tenth-graders", [None]), ("5 hundred", [None]), ("5 mil", [None]),
    ("5 billiard balls", [5]), ("5 milhões", [None]), ("5 mila", [None]), ("5 ألف", [None]), ("5 พัน", [None]),
    ("5 سوق", [5]), ("5 सौर", [5]),
]  # fmt: skip
"""Numbers next to words and signs that change them, in the languages that models write."""


def written(value: float | None) -> Decimal | None:
    return None if value is None else Decimal(repr(value))


@pytest.mark.parametrize(("text", "expected"), [*SPELLINGS, *IN_WORDS])
def test_spellings_of_numbers(text: str, expected: list[float | None]) -> None:
    assert list(numbers(text)) == [written(value) for value in expected]
    assert list(numbers(text, backwards=True)) == [written(value) for value in reversed(expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-5", -5),
        ("- 5", -5),
        (" 42\n", 42),
        ("+5", 5),
        ("1,234.5", 1234.5),
        ("1 234", 1234),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("\N{MINUS SIGN}3", -3),
        ("\N{ARABIC-INDIC DIGIT FIVE}", 5),
        ("5.", None),
        ("$5", None),
        ("5%", None),
        ("3/4", None),
        ("1,5", None),
        ("12:30", None),
        ("101_2", None),
        ("--5", None),
        ("", None),
        ("5 6", None),
        ("inf", None),
        ("nan", None),
        ("0x10", None),
        ("1_0", None),
    ],
)
def test_a_text_that_is_one_number(text: str, expected: float | None) -> None:
    assert plain_number(text) == written(expected)


WRAPPERS = [
    "{}",
    "${}$",
    r"\({}\)",
    r"\[ {} \]",
    r"\boxed{{{}}}",
    r"\text{{{}}}",
    "**{}**",
    "`{}`",
    "({})",
    '"{}"',
    "<b>{}</b>",
]
"""The marks that may enclose a number."""
LEFT = ["", "The answer is ", "x = ", "Answer: ", "so, ", "It costs:\n", "12 + 30 = "]
RIGHT = ["", ".", ", I think", " apples", " km", "!", "\nDone."]
integers = st.integers(-(10**12), 10**12)


@given(integers, st.sampled_from(WRAPPERS), st.sampled_from(LEFT), st.sampled_from(RIGHT), st.booleans())
def test_a_number_is_read_in_every_frame(value: int, wrapper: str, left: str, right: str, grouped: bool) -> None:
    text = left + wrapper.format(f"{value:,}" if grouped else value) + right
    assert next(numbers(text, backwards=True)) == value


@given(st.integers(1, 10**9), st.sampled_from(DASHES + "-"), st.sampled_from(["", "$", "€", r"\$"]), st.booleans())
def test_every_dash_is_a_sign(value: int, dash: str, currency: str, inside: bool) -> None:
    text = f"The balance is {currency}{dash}{value}." if inside else f"The balance is {dash}{currency}{value}."
    assert list(numbers(text)) == [-value]


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.sampled_from("/*^×·÷-\N{EN DASH}:_"),
    st.sampled_from(["", " "]),
    st.data(),
)
def test_a_part_of_an_expression_is_no_number(
    left: int, right: int, joint: str, space: str, data: st.DataObject
) -> None:
    space = "" if joint in ":_" else space
    frame = data.draw(st.sampled_from(["{}", "The answer is {}.", "${}$", "({})"]))
    expression = f"{left}{space}{joint}{space}{right}"
    if joint == "_" and len(str(right)) == 3 and 0 < left < 1000:
        return  # a group of digits
    assert set(numbers(frame.format(expression))) == {None}


@given(
    st.text(st.sampled_from("0123456789.,'-+ $\\{}()[]*/^_eE%:xk\N{EN DASH}½五"), max_size=60) | st.text(max_size=60)
)
def test_no_text_breaks_the_reading(text: str) -> None:
    assert all(value is None or value.is_finite() for value in numbers(text))
    assert plain_number(text) is None or list(numbers(text))


@pytest.mark.parametrize(
    "piece", ["1" * 20_000, "*" * 20_000 + "5", "((" * 10_000 + "5", "1," * 5_000, "5 * " * 3_000, "<a" * 20_000]
)
def test_reading_takes_time_in_proportion_to_the_text(piece: str) -> None:
    began = time.thread_time()
    list(numbers(piece))
    assert time.thread_time() - began < 5


def test_numbers_of_any_size() -> None:
    assert plain_number("1" * 5_000) == Decimal("1" * 5_000)
    assert next(numbers("1e999")) == Decimal("1e999")
