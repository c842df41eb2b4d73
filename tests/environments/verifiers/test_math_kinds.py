"""Answers that the verifier math reads as a person does, by kinds that math-verify alone reads in another way. Each
outcome was decided by hand."""

from __future__ import annotations

import importlib.util

import pytest

from rookery.environments.verifiers.expressions import clear, gold_latex, joined_relations
from rookery.environments.verifiers.units import unit_of
from rookery.environments.verifiers.verifiers import VERIFIERS, AnyVerifier

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the math extra is not installed"
)

KINDS: dict[str, list[tuple[str, str, int]]] = {
    "intervals and chains of relations": [
        ("[1,2]", r"\boxed{1\le x\le 2}", 1), ("[1,2]", r"\boxed{1 \leq x \leq 2}", 1),
        ("(1,2]", r"\boxed{1<x\le2}", 1), ("(1,2)", r"\boxed{1<x<2}", 1), ("(1,2)", "1<x<2", 1),
        ("[1,2]", "The answer is 1 ≤ x ≤ 2.", 1), ("[1,2]", r"\boxed{2 \ge x \ge 1}", 1),
        (r"1 \le x \le 2", r"\boxed{2 \ge x \ge 1}", 1), ("[1,2]", r"\boxed{1≤x≤2}", 1),
        (r"(-\infty,1)\cup(3,\infty)", r"\boxed{x<1 \text{ or } x>3}", 1),
        (r"(-\infty,1)\cup(3,\infty)", "x < 1 or x > 3", 1),
        (r"x<1 \text{ or } x>3", r"\boxed{(-\infty,1)\cup(3,\infty)}", 1),
        (r"(-\infty,1]\cup(3,\infty)", r"\boxed{x\le1 \text{ or } x>3}", 1), (r"x \in (1,2)", r"\boxed{1<x<2}", 1),
        (r"x>1 \text{ and } x<2", r"\boxed{(1,2)}", 1), (r"x>1 \text{ and } x<2", r"\boxed{1<x<2}", 1),
        ("|x|<2", r"\boxed{-2<x<2}", 1), ("2x>6", r"\boxed{x>3}", 1), (r"[0,\pi]", r"\boxed{0\le\theta\le\pi}", 1),
        (r"[0,2\pi)", r"\boxed{0 \le x < 2\pi}", 1), ("[1,2]", r"\boxed{1<x<2}", 0),
        (r"1\le x\le 2", r"\boxed{[1,2)}", 0), (r"1 \le x \le 2", r"\boxed{1 \le y \le 2}", 0),
        (r"x<1 \text{ or } x>3", r"\boxed{x<1}", 0), (r"x<1 \text{ or } x>3", r"\boxed{x>3}", 0),
        ("x>3", r"\boxed{x<1 \text{ or } x>3}", 0), ("x<1", r"\boxed{x<1 \text{ or } x>3}", 0),
        (r"(-\infty,1]\cup(3,\infty)", r"\boxed{x<1 \text{ or } x>3}", 0), ("0<x<1", r"\boxed{(0,1]}", 0),
        (r"\mathbb{R}\setminus\{2\}", r"\boxed{\mathbb{R}}", 0), (r"1\le x\le 2", r"\boxed{[1,2]}", 1),
        ("1≤x≤2", r"\boxed{[1,2]}", 1), (r"x<1 \text{ or } x>3", r"\boxed{x>3 \text{ or } x<1}", 1),
        (r"x<1 \text{ or } x>3", r"\boxed{x<1 or x>3}", 1), ("x<1 or x>3", r"\boxed{x<1\text{ or }x>3}", 1),
        ("|x|<2", r"\boxed{(-2,2)}", 1),
    ],
    "mixed numbers": [
        (r"12\frac{1}{2}\%", r"\boxed{12.5\%}", 1), ("1½", r"\boxed{0.5}", 0), (r"1\frac12", r"\boxed{1.5}", 1),
        (r"1 \tfrac{1}{2}", r"\boxed{3/2}", 1), (r"-1\frac12", r"\boxed{-1.5}", 1), ("1½", r"\boxed{1.5}", 1),
        ("1½", r"\boxed{\frac32}", 1), (r"x\frac12", r"\boxed{x/2}", 1),
    ],
    "signs and digits of other languages": [
        ("1234567", r"\boxed{1’234’567}", 1), ("1234", r"\boxed{１，２３４}", 1), ("x+1", r"\boxed{𝑥+1}", 1),
        ("3:2", r"\boxed{3∶2}", 1), ("6", r"\boxed{2✕3}", 1), ("6", r"\boxed{2⨯3}", 1),
        ("(1, 2)", r"\boxed{（1，2）}", 1), ("1, 2", r"\boxed{1，2}", 1), ("1, 2", r"\boxed{1、2}", 1),
        ("1, 2", r"\boxed{1；2}", 1), ("-5", r"\boxed{负5}", 1), ("x₁", r"\boxed{x_1}", 1),
        ("⟨1,2⟩", r"\boxed{\langle 1,2\rangle}", 1), ("1234.5", r"\boxed{1 234,5}", 0),
        ("12345", r"\boxed{1,2345}", 0), ("5", r"\boxed{负5}", 0), ("2", r"\boxed{1、2}", 0),
        ("1", r"\boxed{1；2}", 0), ("(2, 1)", r"\boxed{（1，2）}", 0), ("1234567", "\\boxed{1\u202f234\u202f567}", 1),
        ("1234567", "\\boxed{1\u2009234\u2009567}", 1), ("1234567.89", r"\boxed{1 234 567.89}", 1),
        ("1234567", r"\boxed{1 234 567}", 1), ("1234", r"\boxed{１２３４}", 1), ("3.5", r"\boxed{٣٫٥}", 1),
    ],
    "units": [
        ("5 kg", r"\boxed{5 lb}", 0), ("5 kg", r"\boxed{5\text{ lb}}", 0), ("5 pounds", r"\boxed{5 kg}", 0),
        ("16 ounces", r"\boxed{1 pound}", 1), ("1 gallon", r"\boxed{4 quarts}", 1),
        ("1 gallon", r"\boxed{1 quart}", 0), (r"5\text{ N}", r"\boxed{5\text{ kN}}", 0),
        (r"5\text{ kJ}", r"\boxed{5000\text{ J}}", 1), (r"5\text{ kJ}", r"\boxed{5\text{ J}}", 0),
        (r"5\text{ kW}", r"\boxed{5000\text{ W}}", 1), (r"3\text{ V}", r"\boxed{3\text{ mV}}", 0),
        (r"3\text{ A}", r"\boxed{3000\text{ mA}}", 1), (r"2\text{ MHz}", r"\boxed{2\text{ kHz}}", 0),
        ("5 joules", r"\boxed{5 kilojoules}", 0), ("5 Newtons", r"\boxed{5\text{ N}}", 1),
        (r"5\text{ μm}", r"\boxed{5\text{ mm}}", 0), ("50 cents", r"\boxed{\$0.50}", 1),
        ("$5", r"\boxed{5 cents}", 0), ("5 dollars", r"\boxed{5 cents}", 0), ("5 dollars", r"\boxed{500 cents}", 1),
        ("3 ft", r"\boxed{1 yd}", 1), ("5 m", r"\boxed{5 meters per second}", 0), ("2 tonnes", r"\boxed{2000 kg}", 1),
        ("5 bits", r"\boxed{5 bytes}", 0), ("2 bytes", r"\boxed{16 bits}", 1),
        (r"101325\text{ Pa}", r"\boxed{1\text{ atm}}", 1), ("2 cups", r"\boxed{1 pint}", 1),
        ("5 ms", r"\boxed{5 s}", 0), ("5 nm", r"\boxed{5\text{ mm}}", 0),
        (r"5\,\mu\text{m}", r"\boxed{5\text{ m}}", 0), ("5 cents", r"\boxed{0.05}", 0),
        ("1 year", r"\boxed{365 days}", 0), ("100 km/h", r"\boxed{100 mph}", 0), ("5N", r"\boxed{5}", 0),
        ("5V", r"\boxed{5}", 0), ("3K", r"\boxed{3}", 0), (r"300\text{ K}", r"\boxed{27°C}", 0),
        (r"2\text{ N}", r"\boxed{2}", 1), ("2", r"\boxed{2\text{ N}}", 1), (r"\$5", r"\boxed{5 dollars}", 1),
        (r"\$1,234.50", r"\boxed{1234.5 dollars}", 1), (r"\$5", r"\boxed{5}", 1), ("5", r"\boxed{\$5}", 1),
    ],
    "sets and tuples": [
        ("(1,2),(3,4)", r"\boxed{(1,2)}", 0), ("(1,2),(3,4)", r"\boxed{(2,1),(3,4)}", 0),
        ("(1, 2, 3)", r"\boxed{(1, 2, 4)}", 0), ("(1,2,3)", r"\boxed{(3,2,1)}", 0), ("(0,0)", r"\boxed{0}", 0),
        ("0", r"\boxed{(0,0)}", 0), ("(1,2)", r"\boxed{(x,y)=(2,1)}", 0), ("(1,-2)", r"\boxed{(1,2)}", 0),
        ("(-1,2)", r"\boxed{(1,2)}", 0), ("(1,2)", r"\boxed{1 < 2}", 0), (r"\{1,2\}", r"\boxed{1,2}", 1),
        ("1,2", r"\boxed{\{1,2\}}", 1), (r"\{1,2\}", r"\boxed{x=1 \text{ or } x=2}", 1),
        (r"\{1,1,2\}", r"\boxed{\{1,2\}}", 1), ("(1,2),(3,4)", r"\boxed{(3,4),(1,2)}", 1),
        (r"\{(1,2),(3,4)\}", r"\boxed{(1,2),(3,4)}", 1),
    ],
    "matrices": [
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", 0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", 0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{10}", 0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\\3\end{pmatrix}}", 0),
        (r"\begin{cases}x=1\\y=2\end{cases}", r"\boxed{x=2,y=1}", 0),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{3}", 0),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}", 1),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\left[\begin{array}{cc}1&2\\3&4\end{array}\right]}", 1),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\boxed{-2}", 1),
        (r"2\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\4\end{pmatrix}}", 1),
        (r"\begin{pmatrix}\frac12\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}0.5\\2\end{pmatrix}}", 1),
    ],
    "equations": [
        ("x+y=3", r"\boxed{x+y=4}", 0), ("y=2x+1", r"\boxed{y=2x+2}", 0), ("x=5", r"\boxed{y=5}", 0),
        ("y=x^2", r"\boxed{y=-x^2}", 0), ("f(x)=x^2", r"\boxed{f(x)=x^3}", 0), ("x^2+y^2=1", r"\boxed{x^2+y^2=2}", 0),
        ("x^2+y^2=1", r"\boxed{1}", 0), ("y = 3", r"\boxed{x = 3}", 0), ("f(x)=2x", r"\boxed{g(x)=2x}", 0),
        ("E=mc^2", r"\boxed{E=mc^3}", 0), ("y=2x+1", r"\boxed{2x+1}", 1), ("y=2x+1", r"\boxed{y-2x=1}", 1),
        ("2x+y=3", r"\boxed{y=3-2x}", 1), ("x^2+y^2=1", r"\boxed{x^2+y^2-1=0}", 1), ("x=2y", r"\boxed{y=x/2}", 1),
        ("f(x)=x^2", r"\boxed{x^2}", 1),
    ],
    "choices with their text": [
        ("B", "Answer: B) Paris", 1), ("B", "The answer is B: Paris", 1), ("B", "Option B is correct.", 1),
        ("B", "**B**. Paris", 1), ("B", r"\boxed{\text{B) Paris}}", 1), ("B", r"\boxed{\text{B: Paris}}", 1),
        ("B", "The correct answer is **(B)** 12.", 1), ("I and II only", r"\boxed{\text{I and II only}}", 1),
        ("B", "Ｂ", 1), ("C", "选C", 1), ("C", "答案是C。", 1), ("C", "答案：C", 1),
        ("B", "C. Because B is wrong.", 0), ("B", "The answer is (C).", 0), ("B", r"\boxed{A}", 0),
        ("(B) 12", r"\boxed{(C) 12}", 0), ("(B) 12", r"\boxed{13}", 0), ("A and C", r"\boxed{A}", 0),
        ("I and III", r"\boxed{I and II}", 0), ("II", r"\boxed{III}", 0), ("II", r"\boxed{2}", 0),
        ("C", "答案：D", 0), ("B", r"\boxed{b}", 1), ("B", "B)", 1), ("B", "(B).", 1), ("B", "Answer: **B**", 1),
        ("(B) 12", r"\boxed{12}", 1), ("(B) 12", r"\boxed{B}", 1),
    ],
    "the answer in a reply": [
        ("5", "答案：5", 1), ("5", "答案是5", 1), ("2x", "f'(x) = 2x", 1), (r"2\sqrt{3}", "It's 2√3.", 1),
        ("2", "x_1 = 1, x_2 = 2", 0), ("1, 2", "x_1 = 1, x_2 = 2", 1), ("5", r"\boxed{\text{The answer is } 5}", 1),
        ("5", r"\boxed{\text{Answer: } 5}", 1), ("5", r"\framebox{5}", 1),
        ("5", r"\boxed{\begin{aligned}5\end{aligned}}", 1), ("5", r"\boxed{\boldsymbol{5}}", 1),
        ("5", r"\boxed{\underline{5}}", 1), ("5", r"-\boxed{5}", 0), ("-5", r"-\boxed{5}", 1),
        ("5", r"2\boxed{5}", 0), ("5", r"\frac{3}{\boxed{5}}", 0), ("3", "x = -3", 0),
        ("5", "The answer is five.", 0), ("6", "The answer is 5. (Not 6.)", 0), ("5", "3 * 5 = 15", 0),
        ("5", r"\boxed{5!}", 0), ("50", r"\boxed{5}0", 0), ("3/5", r"\frac{3}{\boxed{5}}", 0),
        ("5", "First I got 4. The answer is 5", 1), ("5", "**Final Answer**: 5", 1), ("5", "#### 5", 1),
        ("5", "答案是 5。", 1), ("5", r"The answer is \(5\).", 1), ("1/2", "The answer is 1/2.", 1),
    ],
    "per cent": [
        (r"-5\%", r"\boxed{-5}", 1), (r"25\%", r"\boxed{2.5}", 0), (r"5\%", r"\boxed{-5\%}", 0),
        (r"25\%", r"\boxed{1/4}", 1), ("0.25", r"\boxed{25\%}", 1), ("25", r"\boxed{25\%}", 1),
        (r"25\%", r"\boxed{25}", 1), (r"2.5\%", r"\boxed{0.025}", 1), (r"150\%", r"\boxed{1.5}", 1),
    ],
    "functions": [
        ("f'(x)", r"\boxed{f(x)}", 0), ("f''(x)", r"\boxed{f'(x)}", 0), (r"\min(1,2)", r"\boxed{2}", 0),
        (r"\sqrt{4}", r"\boxed{-2}", 0), (r"\cos 2x", r"\boxed{2\cos^2 x+1}", 0), ("f^{-1}(x)", r"\boxed{f(x)}", 0),
        (r"\sin^2 x", r"\boxed{(\sin x)^2}", 1), (r"\sin^{-1}(1)", r"\boxed{\arcsin 1}", 1),
        (r"\tan^{-1} 2", r"\boxed{\arctan 2}", 1), (r"\sum_{k=1}^{10} k", r"\boxed{55}", 1),
        (r"\int_0^1 x dx", r"\boxed{\frac12}", 1), (r"\lim_{x\to0}\frac{\sin x}{x}", r"\boxed{1}", 1),
    ],
    "words": [
        ("infinitely many", r"\boxed{\text{infinitely many}}", 1),
        ("right-angled", r"\boxed{\text{right-angled}}", 1), ("New York", r"\boxed{York New}", 0),
        ("New York", "The answer is New York.", 1), ("no solution", "There is no solution.", 1),
        ("John Smith", r"\boxed{Smith John}", 0), ("北京", r"\boxed{北京}", 1), ("北京", r"\boxed{上海}", 0),
        ("是", r"\boxed{否}", 0), ("да", r"\boxed{нет}", 0), ("да", r"\boxed{да}", 1),
        ("Zürich", r"\boxed{Zürich}", 1), ("Zürich", r"\boxed{Zurich}", 0), ("café", r"\boxed{cafe}", 0),
        ("the sun", r"\boxed{the nus}", 0), ("isosceles triangle", r"\boxed{\text{triangle isosceles}}", 0),
        ("isosceles triangle", r"\boxed{\text{isosceles triangle}}", 1),
        ("isosceles triangle", r"\boxed{isosceles triangle}", 1), ("Привет", r"\boxed{тевирП}", 0),
        ("infinitely many", r"\boxed{\text{finitely many}}", 0), ("increasing", r"\boxed{decreasing}", 0),
        ("true", "The statement is false", 0), ("even", r"\boxed{odd}", 0),
        ("New York", r"\boxed{\text{York New}}", 0), ("no solution", r"\boxed{\text{solution no}}", 0),
        ("John Smith", r"\boxed{\text{Smith John}}", 0), ("x is even", r"\boxed{x is odd}", 0),
        ("Alice", r"\boxed{\text{Celia}}", 0), ("left", r"\boxed{felt}", 0), ("Monday", "It is Monday.", 1),
        ("blue", "The ball is blue.", 1), ("True", "true.", 1), ("New York", r"\boxed{\text{New York}}", 1),
        ("Alice", r"\boxed{\text{Alice}}", 1), ("always", r"\boxed{\text{always}}", 1),
    ],
    "symbols and figures": [
        (r"p \land q", r"\boxed{p \lor q}", 0), (r"A \subset B", r"\boxed{B \subset A}", 0),
        (r"a \parallel b", r"\boxed{a \perp b}", 0), (r"a \parallel b", r"\boxed{a \parallel c}", 0),
        (r"A \to B", r"\boxed{B \to A}", 0), (r"A \to B", r"\boxed{A \to C}", 0), (r"\neg p", r"\boxed{p}", 0),
        (r"\forall x", r"\boxed{\exists x}", 0), ("x'", r"\boxed{x}", 0), (r"\angle ABC", r"\boxed{\angle BCA}", 0),
        (r"a \oplus b", r"\boxed{a \otimes b}", 0), (r"a \sim b", r"\boxed{a \cong b}", 0),
        (r"n \propto m", r"\boxed{m \propto n}", 0), (r"x \gg y", r"\boxed{x \ll y}", 0),
        (r"p \leftrightarrow q", r"\boxed{p \to q}", 0), (r"x \in A", r"\boxed{x \notin A}", 0),
        ("x_1", r"\boxed{x_2}", 0), (r"\vec{a}", r"\boxed{\vec{b}}", 0), (r"\bar{x}", r"\boxed{x}", 0),
        (r"\hat{x}", r"\boxed{\bar{x}}", 0), (r"\overline{AB}", r"\boxed{\overline{BA}}", 0),
        (r"\triangle ABC", r"\boxed{\triangle ABD}", 0), (r"\nabla f", r"\boxed{f}", 0),
        (r"\alpha", r"\boxed{\beta}", 0), (r"\hbar", r"\boxed{h}", 0), (r"a \times b", r"\boxed{b \times a}", 1),
        (r"\Gamma", r"\boxed{\gamma}", 1), (r"A \times B", r"\boxed{B \times A}", 1),
    ],
    "chemistry": [
        ("NaCl", r"\boxed{ClNa}", 0), (r"2H_2 + O_2 \to 2H_2O", r"\boxed{2H_2O \to 2H_2 + O_2}", 0),
        (r"\ce{H2O}", r"\boxed{\ce{H2O}}", 1), (r"\ce{H2O}", r"\boxed{\ce{CO2}}", 0), ("H_2O", r"\boxed{H_2O_2}", 0),
        ("CO_2", r"\boxed{CO}", 0), ("H_2SO_4", r"\boxed{H_4SO_2}", 0),
        (r"2H_2 + O_2 \to 2H_2O", r"\boxed{2H_2 + O_2 \to H_2O}", 0), ("C_6H_{12}O_6", r"\boxed{C_{12}H_6O_6}", 0),
        ("H_2O", r"\boxed{H_2O}", 1), ("CO_2", r"\boxed{\text{CO}_2}", 1), ("NaCl", r"\boxed{\text{NaCl}}", 1),
        (r"\mathrm{H_2SO_4}", r"\boxed{H_2SO_4}", 1), (r"2H_2 + O_2 \to 2H_2O", r"\boxed{2H_2 + O_2 \to 2H_2O}", 1),
        ("pH = 7", r"\boxed{7}", 1),
    ],
    "decimals": [
        (r"0.\dot{3}", r"\boxed{\frac13}", 1), (r"0.\dot3", r"\boxed{\frac13}", 1),
        (r"\frac13", r"\boxed{0.\dot{3}}", 1), (r"0.\dot{1}\dot{2}", r"\boxed{\frac{4}{33}}", 1),
        (r"0.\dot{1}4285\dot{7}", r"\boxed{\frac17}", 1), (r"\frac13", r"\boxed{0.(3)}", 1),
        ("1.0", r"\boxed{1.0000000001}", 0), (r"\pi", r"\boxed{3.14}", 0), ("3.14", r"\boxed{\pi}", 0),
        ("1.414", r"\boxed{\sqrt2}", 0), ("0", r"\boxed{0.(3)}", 0), ("0.333", r"\boxed{0.\overline{3}}", 0),
        ("0.3", r"\boxed{0.\overline{3}}", 0), (r"\frac{1}{3}", r"\boxed{0.3\ldots}", 0), ("22/7", r"\boxed{\pi}", 0),
        ("1e-10", r"\boxed{0}", 0), ("0", r"\boxed{1e-10}", 0), (r"\approx 3.14", r"\boxed{3.14}", 1),
        ("3.14", r"\boxed{\approx 3.14}", 1), ("5.0", r"\boxed{5}", 1), ("5", r"\boxed{5.00}", 1),
        (r"\frac13", r"\boxed{0.\overline{3}...}", 1), ("1/7", r"\boxed{0.142857}", 1),
    ],
    "variables that look like units": [
        ("5t", r"\boxed{5}", 0), ("5c", r"\boxed{5}", 0), ("3h", r"\boxed{3}", 0), ("2d", r"\boxed{2}", 0),
        ("x+3t", r"\boxed{x+3}", 0), (r"\frac{1}{2}h", r"\boxed{\frac12}", 0), (r"\pi d", r"\boxed{\pi}", 0),
        (r"\pi r^2 h", r"\boxed{\pi r^2}", 0), ("4g", r"\boxed{4}", 0), ("6m", r"\boxed{6}", 0),
        ("9s", r"\boxed{9}", 0), ("8l", r"\boxed{8}", 0), ("2ab", r"\boxed{2}", 0), ("5 t", r"\boxed{5}", 0),
        ("3 c", r"\boxed{3}", 0), ("x^2 t", r"\boxed{x^2}", 0), ("7am", r"\boxed{7}", 0), ("2bc", r"\boxed{2}", 0),
        ("3pm", r"\boxed{3}", 0), ("x d", r"\boxed{x}", 0), ("5o", r"\boxed{5}", 0), ("v t", r"\boxed{v}", 0),
        ("3x^2c", r"\boxed{3x^2}", 0), ("F d", r"\boxed{F}", 0), ("5t", r"\boxed{t \cdot 5}", 1),
        ("3h", r"\boxed{h*3}", 1), ("x+3t", r"\boxed{3t+x}", 1), ("2ab", r"\boxed{2ba}", 1),
        (r"\frac{h}{2}", r"\boxed{\frac12 h}", 1), ("5c", r"\boxed{5C}", 1), ("v t", r"\boxed{t v}", 1),
        ("2l+2w", r"\boxed{2w+2l}", 1), ("2l + 2w", r"\boxed{2l+2}", 0), ("vt", r"\boxed{v}", 0),
        ("at", r"\boxed{a}", 0), ("mg", r"\boxed{m}", 0), ("mgh", r"\boxed{mg}", 0), ("5t", r"\boxed{5t}", 1),
        ("mgh", r"\boxed{hgm}", 1), ("6m", r"\boxed{6m}", 1), ("9.8t", r"\boxed{9.8 t}", 1), ("5", r"\boxed{5 m}", 1),
        ("5 m", r"\boxed{5}", 1),
    ],
    "words after a number": [
        ("5 am", r"\boxed{5 pm}", 0), ("10 more", r"\boxed{10 less}", 0), ("5 north", r"\boxed{5 south}", 0),
        ("5 east", r"\boxed{5 west}", 0), (r"10\% increase", r"\boxed{10\% decrease}", 0),
        (r"10\% profit", r"\boxed{10\% loss}", 0), ("5 above", r"\boxed{5 below}", 0),
        ("5 units up", r"\boxed{5 units down}", 0), ("5 to the left", r"\boxed{5 to the right}", 0),
        ("Rs 500 profit", r"\boxed{Rs 500 loss}", 0), ("profit of 10", r"\boxed{loss of 10}", 0),
        ("5 BC", r"\boxed{5 AD}", 0), ("increase of 5", r"\boxed{decrease of 5}", 0),
        (r"\text{gain of }5", r"\boxed{\text{loss of }5}", 0), ("5 men", r"\boxed{5}", 1),
        ("5 students", r"\boxed{5}", 1), ("5", r"\boxed{5 tiles}", 1), ("5 am", r"\boxed{5}", 1),
    ],
    "texts that change a number": [
        ("5", r"\boxed{\text{not } 5}", 0), ("5", r"\boxed{\text{less than } 5}", 0),
        ("5", r"\boxed{5\text{ squared}}", 0),
        ("5", r"\boxed{\text{at least } 5}", 0), ("5", r"\boxed{5 \text{ or more}}", 0),
        ("5", r"\boxed{5\text{th}}", 0),
        ("5", r"\boxed{\text{5 or 6}}", 0), ("6", r"\boxed{\text{5 or 6}}", 0), ("5", r"\boxed{\text{5 minus 3}}", 0),
        ("5", r"\boxed{5 \text{ hours } 30 \text{ minutes}}", 0), ("30", r"\boxed{5 \text{ h } 30 \text{ min}}", 0),
        ("5", r"\boxed{\text{half of } 5}", 0), ("5", r"\boxed{\text{twice } 5}", 0), ("5", r"\boxed{5\text{k}}", 0),
        ("5", r"\boxed{5\text{ over }6}", 0), ("5", r"\boxed{5 \text{ and a half}}", 0),
        ("6", r"\boxed{5\text{ plus }6}", 0),
        ("5", r"\boxed{5 \text{ out of } 6}", 0), (r"5 \text{ or more}", r"\boxed{5}", 0),
        (r"5 \text{ or more}", r"\boxed{5\text{ or more}}", 1), (r"5^{\text{th}}", r"\boxed{5^{\text{th}}}", 1),
        ("5", r"\boxed{5 \text{ apples}}", 1), (r"\mathrm{H_2SO_4}", r"\boxed{\text{H}_2\text{SO}_4}", 1),
    ],
    "signs": [
        ("5", r"The answer is -$\boxed{5}$.", 0), ("-5", r"The answer is -$\boxed{5}$.", 1), ("5", r"-\,\boxed{5}", 0),
        ("5", r"minus $\boxed{5}$", 0), ("-5", r"It is negative \boxed{5}.", 1), ("5", r"$-$\boxed{5}", 0),
        ("5", r"x = - \boxed{5}", 0), ("5", r"-(\boxed{5})", 0), ("-5", r"-\left(\boxed{5}\right)", 1),
        ("5", r"\boxed{\text{-}5}", 0), ("-5", r"\boxed{\text{-}5}", 1), ("5", r"\boxed{{-}5}", 0),
        ("-5", r"\boxed{{-}5}", 1),
        ("-5", r"\boxed{\text{negative } 5}", 1), ("5", r"\boxed{\text{minus } 5}", 0), ("-5", r"\boxed{minus 5}", 1),
        ("5", r"\boxed{—5}", 0), ("5", r"\boxed{⁻5}", 0), ("5", r"\boxed{➖5}", 0), ("5", "So:\n- \\boxed{5}", 1),
    ],
    "text around a box": [
        ("5", r"The answer is not \boxed{5}.", 0), ("5", r"It isn't $\boxed{5}$.", 0), ("5", r"x \neq \boxed{5}", 0),
        ("5", r"$\boxed{5}$ million", 0), ("5", r"\boxed{5} thousand dollars", 0),
        ("5", r"\boxed{5}\text{ billion}", 0),
        ("5", r"\boxed{5}^2", 0), ("5", r"\boxed{5}/2", 0), ("5", r"10^{\boxed{5}}", 0), ("5", r"2^\boxed{5}", 0),
        ("5", r"\boxed{5}0", 0), ("5", r"\boxed{5}^\circ", 1), ("5", r"\boxed{5} apples", 1), ("5", r"\boxed{5}!", 1),
        ("5", r"**\boxed{5}**", 1), ("5", r"It is not 4, it is \boxed{5}.", 1), ("5", r"$x = \boxed{5}$, not 6", 1),
    ],
    "numbers at the end of a reply": [
        ("5", "5 million", 0), ("5", "It is $5$ thousand.", 0), ("5", "5 is wrong.", 0),
        ("5", "5 is not the answer", 0),
        ("5", "The answer cannot be 5.", 0), ("5", "The answer isn't 5, it's 6", 0),
        ("6", "The answer isn't 5, it's 6", 1),
        ("5", "minus 5", 0), ("-5", "minus 5", 1), ("-5", "The answer is negative 5.", 1), ("5", "5²", 0),
        ("25", "5²", 1),
        ("6", "5 6", 0), ("6", "x=5 or maybe 6", 0), ("6", "5 (or 6)", 0), ("3", "5 apples and 3 pears", 0),
        ("10", "5 out of 10", 0), ("4", "A. 1 B. 2 C. 3 D. 4", 0), ("1234", "It is 1 234", 1), ("3.5", "3 1/2", 1),
        ("5", "We get 5.", 1), ("5", "It is 5, because 2 is even.", 0), ("5", "So the sum of 2 and 3 is 5.", 1),
    ],
    "equations of numbers": [
        ("6", r"\boxed{4+1=6}", 0), ("5", r"\boxed{4+1=5}", 1), ("6", r"\boxed{5=6}", 0), ("5", r"\boxed{5=5=6}", 0),
        (r"\frac12", r"\boxed{\frac{2}{4}=\frac{1}{2}}", 1), ("0.5", r"\boxed{1/2=0.5}", 1), ("x=5", r"\boxed{5=x}", 1),
    ],
    "values that repeat": [
        ("1, 1, 2", r"\boxed{1, 2}", 0), ("1, 2", r"\boxed{1, 1, 2}", 0), ("5", r"\boxed{5, 5}", 0),
        ("5, 5", r"\boxed{5}", 0),
        ("1, 2, 1", r"\boxed{2, 1, 2}", 0), ("1, 1, 2", r"\boxed{1, 1, 2}", 1), (r"2,4,8,\ldots", r"\boxed{2,4,8}", 0),
        (r"\{1,1,2\}", r"\boxed{\{1,2\}}", 1), ("-2, 2", r"\boxed{\pm 2}", 1), ("1,234", r"\boxed{1234}", 1),
    ],
    "boxes next to each other": [
        ("6", r"\boxed{5}/\boxed{6}", 0), ("6", r"\boxed{5}\cdot\boxed{6}", 0),
        ("6", r"\frac{\boxed{5}}{\boxed{6}}", 0),
        ("6", r"\boxed{5} \text{ or } \boxed{6}", 0), ("6", r"\boxed{5}; \boxed{6}", 0),
        ("6", r"\boxed{5} & \boxed{6}", 0),
        ("6", r"\boxed{5}\boxed{6}", 0), ("6", "(a) \\boxed{5}\n(b) \\boxed{6}", 1),
        ("6", r"\boxed{5} is wrong: \boxed{6}", 1),
        ("5", r"\boxed{5 \mod 6}", 0), ("5", r"\boxed{\phantom{5}}", 0), ("5", r"\boxed{5 \approx 6}", 0),
    ],
    "lists that are no number": [
        ("3", r"\boxed{[3,3]}", 0), ("3", "$[3,3]$", 0), ("3", "The answer is [3,3].", 0), ("[3,3]", r"\boxed{3}", 0),
        ("3", r"\boxed{\{3,3\}}", 0), ("3", r"\boxed{(3,3)}", 0), ("[3,3]", r"\boxed{[3,3]}", 1),
        ("3", r"\boxed{[3,3]\cup[3,3]}", 0), ("3", r"\boxed{x \in [3,3]}", 0), ("3", r"\boxed{x=[3,3]}", 0),
        ("3", r"\boxed{\left[3,3\right]}", 0), ("3", r"\boxed{\langle 3,3\rangle}", 0), ("x", r"\boxed{[x,x]}", 0),
        (r"\frac12", r"\boxed{[\frac12,\frac12]}", 0), ("3", r"\boxed{(3)}", 1), ("3", r"\boxed{\gcd(3,6)}", 1),
        ("3", r"\boxed{\max(3,2)}", 1), ("3", r"\boxed{3 \le x \le 3}", 0),
    ],
    "empty sets": [
        (answer, reply, 0) for answer in ("5", r"\emptyset")
        for reply in (r"\boxed{\emptyset 5}", r"\boxed{5\emptyset}", r"\boxed{\emptyset, 5}", r"\boxed{\emptyset + 5}",
                      r"\boxed{\varnothing 5}", r"\boxed{∅5}", r"$\emptyset 5$", r"\boxed{5\{\}}", r"\boxed{\{\}5}",
                      r"\boxed{\{5,\emptyset\}}", r"\boxed{\{\emptyset\}}", r"\boxed{\emptyset \cup 5}")
    ] + [
        (r"\emptyset", reply, 1)
        for reply in (r"\boxed{\emptyset}", r"\boxed{x\in\emptyset}", r"\boxed{S=\emptyset}", r"\boxed{\varnothing.}",
                      r"\boxed{\emptyset \text{ (no solution)}}",
                      r"\boxed{\{\}}", r"The answer is $\emptyset$.", "∅",
                      "The answer is ∅.", r"so x is in \emptyset: \emptyset")
    ] + [(r"\{\emptyset\}", r"\boxed{\{\emptyset\}}", 1), ("0", r"\boxed{\emptyset}", 0)],
    "signs that are left out before a number": [
        (answer, reply, 0) for answer in ("5", "6")
        for reply in (r"\boxed{6 \mathbb{R} 5}", r"\boxed{6 \star 5}", r"\boxed{5 \implies 6}", r"\boxed{6 \& 5}",
                      r"\boxed{5 \Rightarrow 6}", r"\boxed{6 @ 5}", r"\boxed{6 \big 5}", r"\boxed{5 \cup 6}",
                      r"\boxed{5 \mapsto 6}", r"\boxed{\partial 5}", r"\boxed{\sum 5}", r"\boxed{\notin 5}",
                      r"\boxed{\mathbb{N} 5}", r"\boxed{5 \text{ is wrong}}", r"$6 \circ 5$")
    ] + [
        ("5", reply, 1)
        for reply in (r"\boxed{\therefore 5}", r"\boxed{\displaystyle 5}", r"\boxed{\lfloor 5.9 \rfloor}",
                      r"\boxed{\left(5\right)}", r"\boxed{x = 2 \cdot 2 + 1 = 5}", r"\boxed{\approx 5}")
    ],
    "two numbers side by side": [
        (answer, reply, 0) for answer in ("5", "6", "30", "56", "11")
        for reply in (r"\boxed{5 \quad 6}", r"\boxed{5\qquad6}", "\\boxed{5\n6}", "\\boxed{5\t6}")
    ],
}  # fmt: skip
"""An answer, a reply, and its reward."""


@pytest.fixture(scope="module")
def verifier() -> AnyVerifier:
    """One for all tests: its process imports math-verify, which takes longer than a hundred comparisons."""
    return VERIFIERS["math"].model_validate({})


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_read_as_a_person_reads_them(verifier: AnyVerifier, kind: str) -> None:
    found = [(answer, reply, verifier.score(reply, {"answer": answer})[0]) for answer, reply, _ in KINDS[kind]]
    assert [case for case in found if case not in KINDS[kind]] == []


@pytest.mark.parametrize(
    ("name", "enclosed", "measure"),
    [("lb", False, "mass"), ("N", True, "force"), ("N", False, ""), ("ms", True, "time"), ("ms", False, ""),
     ("As", False, ""), ("Joules", False, "energy"), ("μm", False, "length"), ("meters per second", True, "speed"),
     ("grams per liter", True, "mass per volume"), ("apples per day", True, ""), ("x", True, "")],
)  # fmt: skip
def test_a_unit_is_known_by_its_name(name: str, enclosed: bool, measure: str) -> None:
    assert (unit_of(name, enclosed=enclosed) or ("",))[0] == measure


@pytest.mark.parametrize(
    "answer",
    ["She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72", "#### 42", "The total is 42",
     "Tom has 5 apples", "It takes 2 hours", "So x = 5, hence the area is 25", "7 since 3+4=7", "x = 5\ny = 6", "5\n6",
     "We have $x=5$, so the area is $25$", "Therefore 3 is prime"],
)  # fmt: skip
def test_a_sentence_or_a_whole_solution_is_no_answer(answer: str) -> None:
    """math-verify takes one of its expressions, or its words as products of letters: no reply would be right."""
    with pytest.raises(ValueError, match=r"answer is .*, which can be read in several ways"):
        gold_latex(answer, "answer")


@pytest.mark.parametrize(
    ("answer", "latex"),
    [("The answer is: 42", r"\boxed{42}"), ("Answer: 42\n", r"\boxed{42}"), ("final answer: x/2", r"\boxed{x/2}"),
     (r"Thus $x$ is 5, so \boxed{5} it is.", r"\boxed{5}"), ("$5$ and $6$", "$5$, $6$"), ("e^{it}", r"\boxed{e^{it}}"),
     ("\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}", "\\boxed{\\begin{pmatrix}\n1\\\\\n2\n\\end{pmatrix}}"),
     ("no solution", r"\boxed{no solution}"), ("profit of 10", r"\boxed{profit of 10}")],
)  # fmt: skip
def test_an_answer_in_a_text_that_names_it_is_one(answer: str, latex: str) -> None:
    assert gold_latex(answer, "answer") == latex


@pytest.mark.parametrize(
    ("answer", "word", "parts"),
    [("x < 1 or x > 3", "or", ["x < 1", "x > 3"]), (r"x<1 \text{ and } y>3", "and", ["x<1", "y>3"]),
     ("1 or 2", "", []), ("x<1 or y>3 and z=2", "", []), ("x<1, y>3", "", [])],
)  # fmt: skip
def test_relations_with_a_word_between_them(answer: str, word: str, parts: list[str]) -> None:
    assert joined_relations(clear(answer) or "") == (word, parts)
