"""Sessions over HTTP, each tenant's own; prompts that are compressed once for many questions."""

from __future__ import annotations

import openai
import pytest
import web
from running import MODEL, running_server

from kvreclaim import LLM, CompressionConfig, demo_model

PROMPT = list(range(5, 105))
QUESTION = [*PROMPT, 9, 8, 7]
SAVE = {"filename": "a.session", "prompt": PROMPT}


def server(**options):
    engine = {name: options.pop(name) for name in ("block_size", "compression") if name in options}
    llm = LLM(demo_model(), num_blocks=128, max_num_seqs=8, max_model_len=512, **engine)
    return running_server(llm, **options)


def post(running, path, body, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with web.Client(base_url=running.base_url, headers=headers) as client:
        return client.post(path, json=body)


def ask(running, prompt, key="none", **more):
    client = openai.OpenAI(base_url=f"{running.base_url}/v1", api_key=key)
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0, **more)


def cached(completion):
    return completion.usage.prompt_tokens_details.cached_tokens


def test_saved_and_restored(tmp_path):
    with server(slot_save_path=str(tmp_path)) as running:
        assert post(running, "/slots/0?action=save", SAVE).status_code == 400  # nothing is cached yet
        expected = ask(running, QUESTION).choices[0].text
        saved = post(running, "/slots/0?action=save", SAVE).json()
        assert saved["id_slot"] == "0"
        assert saved["n_saved"] == 96
        assert saved["n_written"] == (tmp_path / "all" / "a.session").stat().st_size
        assert saved["timings"]["save_ms"] > 0
    with server(slot_save_path=str(tmp_path)) as running:
        restored = post(running, "/slots/7?action=restore", {"filename": "a.session"}).json()
        assert restored["n_restored"] == 96
        assert restored["n_read"] == saved["n_written"]
        answer = ask(running, QUESTION)
        assert answer.choices[0].text == expected
        assert cached(answer) == 96
        assert post(running, "/slots/7?action=erase", {"filename": "a.session"}).json()["n_erased"] == 1
        gone = post(running, "/slots/7?action=restore", {"filename": "a.session"})
        assert gone.status_code == 404
        assert gone.json()["error"]["param"] == "filename"


def test_another_engine_is_told_what_differs(tmp_path):
    with server(slot_save_path=str(tmp_path)) as running:
        ask(running, PROMPT)
        post(running, "/slots/0?action=save", SAVE)
    with server(slot_save_path=str(tmp_path), block_size=32) as running:
        refused = post(running, "/slots/0?action=restore", {"filename": "a.session"})
        assert refused.status_code == 409
        assert "saved with another block_size: '16', here it is '32'" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text


def test_tenants_have_files_of_their_own(tmp_path):
    with server(slot_save_path=str(tmp_path), api_keys=("one", "two"), max_saved_slots=2) as running:
        ask(running, PROMPT, "one")
        assert post(running, "/slots/0?action=save", SAVE, "one").status_code == 200
        assert post(running, "/slots/0?action=save", SAVE, "two").status_code == 400  # not cached for it
        for action in ("restore", "erase"):
            assert (
                post(running, f"/slots/0?action={action}", {"filename": "a.session"}, "two").status_code
                == 404
            )
        assert post(running, "/slots/0?action=save", SAVE).status_code == 401
        assert post(running, "/slots/0?action=save", SAVE | {"filename": "b"}, "one").status_code == 200
        full = post(running, "/slots/0?action=save", SAVE | {"filename": "c"}, "one")
        assert full.status_code == 400
        assert "2 sessions are saved, at most 2" in full.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../a", "a/b", ".a", "", "a" * 129, "a\x00"])
def test_no_name_leads_out_of_the_folder(name, tmp_path):
    with server(slot_save_path=str(tmp_path)) as running:
        ask(running, PROMPT)
        assert post(running, "/slots/0?action=save", SAVE | {"filename": name}).status_code == 400
        assert not list(tmp_path.rglob("*"))


def test_refusals(tmp_path):
    with server() as running:
        refused = post(running, "/slots/0?action=save", SAVE)
        assert refused.status_code == 404
        assert "--slot-save-path" in refused.json()["error"]["message"]
        assert post(running, "/slots/0?action=jump", SAVE).status_code == 400
        assert post(running, "/slots/0", SAVE).status_code == 400
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "a.session").write_bytes(b"no session")
    with server(slot_save_path=str(tmp_path)) as running:
        damaged = post(running, "/slots/0?action=restore", {"filename": "a.session"})
        assert damaged.status_code == 400
        assert "damaged" in damaged.json()["error"]["message"]
        assert post(running, "/slots/0?action=save", {"filename": "b"}).status_code == 400


def test_a_document_is_compressed_once():
    compression = {"policy": "knorm", "budget": 48, "sinks": 2, "recent": 8}
    with server() as running:
        extra = {"kv_compression": compression, "compress_prompt_at": len(PROMPT)}
        first = ask(running, QUESTION, extra_body=extra)
        again = ask(running, [*PROMPT, 3, 4], extra_body=extra)
        assert cached(first) == 0
        assert cached(again) == len(PROMPT)
        with pytest.raises(openai.BadRequestError, match="compression evicts nothing") as error:
            ask(running, QUESTION, extra_body={"compress_prompt_at": 20})
        assert error.value.param == "compress_prompt_at"


def test_what_was_compressed_is_saved_and_restored(tmp_path):
    compression = {"policy": "knorm", "budget": 48, "sinks": 2, "recent": 8, "interval": 16}
    extra = {"kv_compression": compression, "compress_prompt_at": len(PROMPT)}
    with server(slot_save_path=str(tmp_path)) as running:
        assert post(running, "/slots/0?action=save", SAVE | extra).status_code == 400  # nothing is cached yet
        expected = ask(running, QUESTION, extra_body=extra).choices[0].text
        saved = post(running, "/slots/0?action=save", SAVE | extra).json()
        assert saved["n_saved"] == len(PROMPT)
        refused = {
            ("save", "compress_prompt_at"): SAVE | {"kv_compression": compression},
            ("save", "compress_prompt_at", "evicts nothing"): SAVE | {"compress_prompt_at": 10},
            ("restore", "compress_prompt_at"): {"filename": "a.session", "compress_prompt_at": 10},
            ("erase", "kv_compression"): {"filename": "a.session", "kv_compression": compression},
        }
        for (action, field, *words), body in refused.items():
            answer = post(running, f"/slots/0?action={action}", body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field
            assert all(word in answer.text for word in words)
    with server(slot_save_path=str(tmp_path)) as running:
        restored = post(running, "/slots/0?action=restore", {"filename": "a.session"}).json()
        assert restored["n_restored"] == len(PROMPT)
        answer = ask(running, QUESTION, extra_body=extra)
        assert answer.choices[0].text == expected
        assert cached(answer) == len(PROMPT)
        assert cached(ask(running, QUESTION)) == 0


def test_a_breakpoint_says_where():
    compression = CompressionConfig("knorm", budget=48, sinks=2, recent=8, interval=16)
    text = "GO wind " * 40
    system = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]
    llm = LLM(demo_model(), num_blocks=128, max_model_len=512, compression=compression)
    with running_server(llm) as running:
        body = {"model": MODEL, "max_tokens": 4, "system": system}
        used = []
        for question in ("GO up", "GO down"):
            message = body | {"messages": [{"role": "user", "content": question}]}
            answer = post(running, "/v1/messages", message)
            assert answer.status_code == 200, answer.text
            used.append(answer.json()["usage"]["cache_read_input_tokens"])
        assert used[0] == 0
        assert used[1] > 64
        assert llm.engine.scheduler.snapshots.num_hits == 1
