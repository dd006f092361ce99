"""Switch the feature on, and use it from Python and over HTTP.

python try_it.py
"""

from answer_prefix.feature import AnswerPrefixes
from fastapi.testclient import TestClient

from kvreclaim.engine import features

features.FEATURES += (AnswerPrefixes,)  # the line that it takes in engine/features/__init__.py

from kvreclaim import LLM, SamplingParams, demo_model  # noqa: E402  (takes the features)
from kvreclaim.engine.serving.client import AsyncEngine  # noqa: E402
from kvreclaim.server.base.config import ServerConfig  # noqa: E402
from kvreclaim.server.entry.run import create_app  # noqa: E402
from kvreclaim.server.shared.service import Service  # noqa: E402

PROMPT, PREFIX = [3 + i % 60 for i in range(40)], [9, 8, 7]
BODY = {"model": "demo", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

llm = LLM(demo_model(), num_blocks=64)
greedy = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
(out,) = llm.generate({"prompt_token_ids": PROMPT, "answer_prefix": PREFIX}, greedy)
rest = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
(plain,) = llm.generate([PROMPT + PREFIX], rest)
answer = out.outputs[0].token_ids
print(f"Python: as after the longer prompt: {answer == PREFIX + plain.outputs[0].token_ids}")

service = Service(AsyncEngine(llm), ServerConfig(served_model_name=("demo",)))
with TestClient(create_app(service), base_url="http://127.0.0.1") as client:
    body = client.post("/v1/completions", json=BODY | {"max_tokens": 10, "answer_prefix": PREFIX}).json()
    print(f"HTTP: the same: {body['choices'][0]['token_ids'] == answer}")
    print(f"usage: {body['usage']['kv_cache']['prefix_tokens']} tokens")
    refused = client.post("/v1/completions", json=BODY | {"max_tokens": 3, "answer_prefix": PREFIX})
    print(f"{refused.status_code}: {refused.json()['error']['message']}")
    metrics = client.get("/metrics").text.splitlines()
    print(next(line for line in metrics if line.startswith("kvreclaim:answer_prefix_tokens_total")))
