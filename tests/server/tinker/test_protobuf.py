"""Training data in protobuf: what a body may hold, decided before it is parsed."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from rookery import protocol
from rookery.controller.sessions.operations import ForwardBackwardResult, SampleResult, decode_result
from rookery.controller.sessions.operations import encode as encode_result
from rookery.errors import UserError
from rookery.server.bodies import INLINE_BYTES, BodyRefused
from rookery.server.tinker import protobuf
from rookery.worker.trainer.packing import PackedGroup


def request(data: int) -> Any:
    message = protobuf.schema().ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    for _ in range(data):
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(40, dtype="<i4").tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.arange(40, dtype="<i8").tobytes(), protobuf.schema().DTYPE_INT64
        tensor.shape.append(40)
    return message


def test_request_of_many_data_is_parsed() -> None:
    message = request(2000)
    assert protobuf.parse(message.SerializeToString(), 200_000) == message


@pytest.mark.parametrize(
    "empty", [b"\x1a\x00", b"\x1a\x02\x0a\x00", b"\x1a\x04\x12\x02\x12\x00", b"\x2a\x00", b"\x20\x01"]
)
def test_small_messages_without_end_are_refused_before_they_are_parsed(empty: bytes) -> None:
    """An empty message has two bytes in the body and 60 in memory."""
    began = time.thread_time()
    with pytest.raises(BodyRefused, match="200000 items"):
        protobuf.parse(empty * (15_000_000 // len(empty)), 200_000)
    assert time.thread_time() - began < 3


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(body: bytes) -> None:
    """The parser refuses each message that the counter cannot read."""
    descriptor = protobuf.schema().ForwardBackwardRequest.DESCRIPTOR
    try:
        protobuf.parse(body, 1000)
    except DecodeError:
        return
    try:
        assert not protobuf.has_more_fields(body, descriptor, 1000)
    except DecodeError:
        pytest.fail("the parser reads what the counter refuses")


def test_counter_reads_the_fields_that_the_parser_reads() -> None:
    body = request(5).SerializeToString()
    descriptor = protobuf.schema().ForwardBackwardRequest.DESCRIPTOR
    fields = next(most for most in range(1000) if not protobuf.has_more_fields(body, descriptor, most))
    assert fields == 3 + 5 * 10 and len(body) < INLINE_BYTES


def soft(message: Any, columns: np.ndarray, width: int, *, sparse: bool = True) -> Any:
    """``message`` with these targets, and others of weight 0, for the first of its 40 tokens."""
    datum, listed = message.data[0], len(columns)
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.shape[:] = [40, width]
    if sparse:
        tensor.sparse_csr.crow_indices = np.array([0] + [listed] * 40, "<i8").tobytes()
        tensor.sparse_csr.col_indices = columns.astype("<i8").tobytes()
        tensor.sparse_csr.values = columns.astype("<i8").tobytes()
    else:
        tensor.dense = np.zeros((40, width), "<i8").tobytes()
    return message


@pytest.mark.parametrize(
    ("listed", "width", "sparse"),
    [(1025, 1025, False), (1025, 50_000, True), (1024, 1024, False), (1024, 50_000, True)],
)
def test_targets_of_a_token_are_bounded(listed: int, width: int, sparse: bool) -> None:
    """However wide a sparse tensor is, those that it lists count."""
    message = soft(request(1), np.arange(listed) * (width // listed), width, sparse=sparse)
    if listed <= protocol.ROW_TARGETS:
        found = protocol.decode(protocol.batches, protobuf.forward_backward(message).batch).data[0]
        group = PackedGroup.from_datum(found)
        rows = 1 if sparse else 40
        assert (group.tokens, group.memory(0)) == (rows, rows + rows * 1023 / 4096)
        assert len(protocol.integers(found.targets)) == (listed if sparse else 40 * width)
        return
    with pytest.raises(
        UserError, match=r"data\[0\]: target_tokens list 1025 targets for a token, allowed: at most 1024"
    ):
        protobuf.forward_backward(message)
    datum = protocol.Datum(tokens=[1], rows=[0] * listed, targets=[1] * listed)
    with pytest.raises(ValueError, match="1025 targets in a row"):
        PackedGroup.from_datum(datum)


@pytest.mark.parametrize("columns", [[1, 1], [0, 3, 0], [2, 1, 2, 5]])
def test_a_column_twice_in_a_row_is_refused(columns: list[int]) -> None:
    """The last of its values would count, and the others be lost."""
    with pytest.raises(UserError, match="a sparse tensor's indices do not fit its shape: a row has a column twice"):
        protobuf.forward_backward(soft(request(1), np.array(columns), 8))


def test_request_of_a_million_targets_takes_some_times_its_size() -> None:
    """No number is an object: those of one list would take nine times the body."""
    message = request(1)
    datum = message.data[0]
    datum.model_input[0].encoded_text.tokens = np.zeros(1000, "<i4").tobytes()
    tensor = datum.loss_fn_inputs["target_tokens"]
    tensor.shape[:], tensor.dtype = [1000, 1000], protobuf.schema().DTYPE_INT32
    tensor.dense = np.arange(1_000_000, dtype="<i4").tobytes()
    tracemalloc.start()
    try:
        operation = protobuf.forward_backward(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(operation.batch) < 1.1 * len(tensor.dense) and peak < 5 * len(tensor.dense)


@pytest.mark.parametrize("kind", ["<i4", "<i8"])
def test_numbers_reach_the_trainer_as_they_came(kind: str) -> None:
    message, rng = request(1), np.random.default_rng(0)
    message.loss_fn, inputs = "ppo", message.data[0].loss_fn_inputs
    given = {name: rng.normal(size=40).astype("<f4") for name in ("logprobs", "advantages")}
    given["target_tokens"] = rng.integers(-(2**31), 2**31, 40).astype(kind)
    for name, values in given.items():
        code = {"<f4": "FLOAT32", "<i4": "INT32", "<i8": "INT64"}[values.dtype.str]
        inputs[name].dense, inputs[name].dtype = values.tobytes(), getattr(protobuf.schema(), f"DTYPE_{code}")
    group = PackedGroup.from_datum(protocol.decode(protocol.batches, protobuf.forward_backward(message).batch).data[0])
    assert group.prompt == list(range(40)) and group.loss.sources.tolist() == list(range(40))
    assert np.array_equal(group.loss.targets, given["target_tokens"])
    assert np.array_equal(group.loss.logprobs, given["logprobs"])
    assert np.array_equal(group.loss.advantages, given["advantages"]) and set(group.loss.weights) == {1.0}
    inputs["target_tokens"].dtype = protobuf.schema().DTYPE_INT64
    inputs["target_tokens"].dense = np.full(40, 2**31, "<i8").tobytes()
    with pytest.raises(UserError, match="2147483648, which is no token id"):
        protobuf.forward_backward(message)


def test_listed_cells_are_read_in_both_forms() -> None:
    """An earlier service stored lists."""
    logprobs = np.arange(2, dtype="<f4").tobytes()
    forms: tuple[protocol.Integers, ...] = ([1, 5], np.array([1, 5], "<i4").tobytes())
    bodies = {
        protobuf.encode(ForwardBackwardResult(metrics={}, logprobs=logprobs, shapes=[[3, 2]], cells={0: cells}))
        for cells in forms
    }
    assert len(bodies) == 1


@pytest.mark.parametrize("shape", [[2] * 1_000_000, [-1, -40], [1] * 5], ids=["long", "negative", "five"])
def test_odd_shapes_are_refused(shape: list[int]) -> None:
    message = request(1)
    tensor = message.data[0].loss_fn_inputs["target_tokens"]
    del tensor.shape[:]
    tensor.shape.extend(shape)
    with pytest.raises(UserError, match=r"shape|dimensions") as refused:
        protobuf.forward_backward(message)
    assert len(str(refused.value)) < 500


def test_scores_of_a_prompt_are_sent_in_the_sdks_form() -> None:
    """The SDK has a number of its choice where there is no token."""
    scores = protocol.PromptLogprobs(
        logprobs=np.array([-1.0, -2.0], "<f4").tobytes(),
        top_tokens=np.array([7, 8, 9, protocol.NO_TOKEN], "<i4").tobytes(),
        top_logprobs=np.array([-0.5, -1.0, -0.25, -np.inf], "<f4").tobytes(),
    ).after(1, 2)
    result = decode_result(encode_result(SampleResult(texts=[], prompt_logprobs=scores.logprobs, topk=scores)))
    assert isinstance(result, SampleResult)
    sent = protobuf.schema().SampleResponse.FromString(protobuf.encode(result))
    none, likeliest = -99999.0, sent.topk_prompt_logprobs
    np.testing.assert_array_equal(np.frombuffer(sent.prompt_logprobs, "<f4"), [np.nan, -1.0, -2.0])
    assert (likeliest.length, likeliest.k) == (3, 2)
    assert np.frombuffer(likeliest.token_ids, "<i4").tolist() == [0, 0, 7, 8, 9, 0]
    assert np.frombuffer(likeliest.logprobs, "<f4").tolist() == [none, none, -0.5, -1.0, -0.25, none]


def ratios(**changed: float) -> Any:
    """A request for a loss with ratios, with another number at place 3 of some tensors."""
    message = request(1)
    message.loss_fn = "importance_sampling"
    for name in ("logprobs", "advantages"):
        values = np.zeros(40, "<f4")
        values[3] = changed.get(name, 0.0)
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), protobuf.schema().DTYPE_FLOAT32
    return message


@pytest.mark.parametrize("inside", [False, True])
def test_a_field_that_the_schema_does_not_have_is_refused(inside: bool) -> None:
    """As of a newer SDK: it could change what the other fields mean. The parser would pass it over."""
    message = request(2)
    protobuf.forward_backward(protobuf.parse(message.SerializeToString(), 1000))
    (message.data[1] if inside else message).MergeFromString(b"\xa2\x06\x01x")
    with pytest.raises(UserError, match=rf"fields that SDK {protobuf.SUPPORTED} does not send"):
        protobuf.forward_backward(protobuf.parse(message.SerializeToString(), 1000))


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_their_place(name: str, value: float) -> None:
    """One of them makes the whole sum NaN, also where its factor is 0."""
    protobuf.forward_backward(ratios())
    with pytest.raises(UserError, match=rf"data\[0\]: {name} hold {value} at 3, which is no finite number"):
        protobuf.forward_backward(ratios(**{name: value}))


@pytest.mark.parametrize("value", [float("nan"), 1e39])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    message = request(1)
    tensor = message.data[0].loss_fn_inputs["weights"]
    with np.errstate(over="ignore"):
        tensor.dense, tensor.dtype = np.full(40, value, "<f4").tobytes(), protobuf.schema().DTYPE_FLOAT32
    with pytest.raises(UserError, match="weights hold"):
        protobuf.forward_backward(message)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"clip_high_threshold": 0.28},
            "clip_high_threshold is a bound of the ratio, .* for an epsilon of 0.28 give 1.28",
        ),
        (
            {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8},
            "clip_low_threshold is a bound of the ratio, at most 1",
        ),
        ({"clip_high_threshold": 1e300}, r"clip_high_threshold is below 3.4e\+38, given 1e\+300"),
        ({"clip_low_threshold": -1e39}, r"clip_low_threshold is below 3.4e\+38, given -1e\+39"),
    ],
)
def test_bounds_that_no_ratio_of_1_is_within_are_refused(config: dict[str, float], line: str) -> None:
    message = ratios()
    message.loss_fn = "ppo"
    message.loss_fn_config.update({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    protobuf.forward_backward(message)
    message.loss_fn_config.update(config)
    with pytest.raises(UserError, match=line):
        protobuf.forward_backward(message)


def test_a_loss_that_is_not_finite_is_returned_as_such() -> None:
    encoded = protobuf.encode(ForwardBackwardResult(metrics={"loss:sum": float("nan")}, logprobs=b"", shapes=[]))
    message = protobuf.schema().ForwardBackwardOutput()
    message.ParseFromString(encoded)
    assert np.isnan(message.metrics["loss:sum"])
