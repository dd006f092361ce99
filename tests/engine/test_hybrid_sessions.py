"""Sessions of models with recurrent layers hold the state at their end: the next turn goes on from it."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.session_file import SessionFile

FAMILIES = ("qwen3-next", "lfm2", "falcon-h1", "jamba")
(PROMPT,) = tiny.prompts((41,), seed=6)
MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def load(directory, **options) -> LLM:
    given = {"num_blocks": 40, "block_size": 8, "max_num_seqs": 2, **options}
    return LLM(directory, dtype="float32", device="cpu", **given)


def answer(llm: LLM, prompt: list[int]) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], GREEDY)
    assert output.error is None
    assert_idle(llm)
    return output.outputs[0].token_ids, output.metrics.num_cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("host", [0.0, 0.01])
def test_the_next_turn_goes_on_from_a_session(host, family, tiny_dir, tmp_path) -> None:
    path, directory = tmp_path / "a.session", tiny_dir(family)
    first = load(directory, kv_offloading_size=host)
    turn = [*PROMPT, *answer(first, PROMPT)[0], 5, 7, 9]
    info = first.save_session(turn, path)
    assert info.num_tokens == (len(turn) - 4) // 8 * 8  # of the answer the last token is not computed
    second = load(directory, kv_offloading_size=host)
    for _ in range(2):
        assert second.load_session(path).num_tokens == info.num_tokens
        second.engine.memory.check()
    assert answer(second, turn) == (tiny.greedy(directory, [turn], MAX_TOKENS)[0], info.num_tokens)


def test_a_session_from_the_host(tiny_dir, tmp_path) -> None:
    directory, others = tiny_dir("qwen3-next"), tiny.prompts((57, 64), seed=3)
    first = load(directory, kv_offloading_size=0.01, num_blocks=11)
    answer(first, PROMPT)
    for other in others:
        answer(first, other)
    assert first.save_session(PROMPT, tmp_path / "a.session").num_tokens == 40
    second = load(directory, kv_offloading_size=0.01, num_blocks=11)
    second.load_session(tmp_path / "a.session")
    for other in others:
        answer(second, other)
    assert answer(second, PROMPT) == (tiny.greedy(directory, [PROMPT], MAX_TOKENS)[0], 40)
    assert second.engine.tier_stats().host_hit_tokens == 40


def test_what_cannot_begin_is_refused(tiny_dir, tmp_path) -> None:
    path, directory = tmp_path / "a.session", tiny_dir("lfm2")
    llm = load(directory)
    answer(llm, PROMPT)
    llm.save_session(PROMPT, path)
    with pytest.raises(InvalidArgumentError, match="state_checkpoints is 0"):
        load(directory, state_checkpoints=0).load_session(path)
    file = SessionFile.load(path, llm.engine.sessions.fields)
    for state in (None, file.tensors["state"][:-1], file.tensors["state"].view(-1, 2)):
        tensors = {name: tensor for name, tensor in file.tensors.items() if name != "state"}
        tensors |= {} if state is None else {"state": state.contiguous()}
        SessionFile(file.fields, file.facts, tensors).save(path)
        with pytest.raises(InvalidArgumentError, match="holds no state of this model"):
            llm.load_session(path)


def test_a_state_that_cannot_be_written_leaves_nothing(tiny_dir, tmp_path, monkeypatch) -> None:
    path, directory = tmp_path / "a.session", tiny_dir("lfm2")
    llm = load(directory)
    answer(llm, PROMPT)
    llm.save_session(PROMPT, path)
    llm = load(directory)

    def failing(slot, row) -> None:
        raise OSError("no way through")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.states.store, "read_bytes", failing)
        with pytest.raises(OSError, match="no way through"):
            llm.load_session(path)
    assert answer(llm, PROMPT) == (tiny.greedy(directory, [PROMPT], MAX_TOKENS)[0], 0)
