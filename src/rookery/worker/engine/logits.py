"""Changes of a request's logits before its next token is drawn: a grammar, biases, penalties, truncation.

Promises:

* Requests without such parameters are not computed differently: their logits are not read here.
* The reported log-probability is that of the distribution after all changes. Tokens that it excludes have none.
* The state follows from the request's tokens alone, so that a text that moves to another worker goes on as it began.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rookery import protocol
from rookery.tokenization.grammar import ReplyGrammar


class RequestLogits:
    """The changes of one request."""

    def __init__(self, params: protocol.LogitsParams, prompt: list[int], grammar: ReplyGrammar | None = None) -> None:
        """``grammar``: that of the schema. Raises ``ValueError`` for a schema without one."""
        self.params = params
        self._prompt = torch.tensor(sorted(set(prompt)))
        total: dict[int, float] = {}
        for token, bias in params.logit_bias:
            total[token] = total.get(token, 0.0) + bias
        self._biased = torch.tensor(list(total), dtype=torch.int64)
        self._biases = torch.tensor(list(total.values()), dtype=torch.float32)
        if params.schema and grammar is None:
            raise ValueError("this engine has no grammar to follow a schema with")
        self.grammar = grammar

    def apply(self, logits: Tensor, tokens: list[int], temperature: float) -> Tensor:
        """The logits [vocab] float32 from which the token after ``tokens``, the answer so far, is drawn. Raises
        as :meth:`ReplyGrammar.allowed`."""
        line = logits.float().clone()
        if len(self._biased):
            self._biased, self._biases = self._biased.to(line.device), self._biases.to(line.device)  # the first time
            line[self._biased] += self._biases
        self._penalize(line, tokens)
        if self.grammar is not None:
            allowed = torch.from_numpy(self.grammar.allowed(tokens, len(line))).to(line.device)
            line.masked_fill_(~allowed, -torch.inf)
        if temperature > 0:
            self._truncate(line, temperature)
        return line

    def likeliest(self, line: Tensor, temperature: float) -> list[tuple[int, float]]:
        """The likeliest tokens of changed logits with their log-probabilities, best first."""
        count = min(self.params.top_logprobs, len(line))
        if not count:
            return []
        values, tokens = (line / (temperature or 1.0)).log_softmax(-1).topk(count)
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return [(token, value) for token, value in pairs if value > -torch.inf]

    def _penalize(self, line: Tensor, tokens: list[int]) -> None:
        """Repetition divides or multiplies the logits of all tokens of prompt and answer (Keskar et al.,
        arXiv:1909.05858); frequency and presence subtract for those of the answer, as OpenAI defines them."""
        params = self.params
        written, counts = torch.tensor(tokens, dtype=torch.int64, device=line.device).unique(return_counts=True)
        if params.repetition_penalty != 1.0:
            seen = torch.cat((self._prompt.to(line.device), written)).unique()
            values = line[seen]
            line[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            line[written] -= params.frequency_penalty * counts.float() + params.presence_penalty

    def _truncate(self, line: Tensor, temperature: float) -> None:
        """``min_p`` first, then ``top_k``, then ``top_p`` of what is left. The likeliest token always stays, and so do
        tokens as likely as the last that stays by ``top_k``."""
        params = self.params
        if params.min_p > 0:
            p = (line / temperature).softmax(-1)
            line.masked_fill_(p < params.min_p * p.max(), -torch.inf)
        if 0 < params.top_k < len(line):
            line.masked_fill_(line < line.topk(params.top_k).values[-1], -torch.inf)
        if params.top_p < 1:
            p, order = (line / temperature).softmax(-1).sort(descending=True, stable=True)
            outside = p.cumsum(-1) - p >= params.top_p  # the tokens before it have that much already
            outside[0] = False
            line[order[outside]] = -torch.inf
