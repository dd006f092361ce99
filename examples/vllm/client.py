"""OpenAI's own client against a vLLM with compression: a completion, a streamed chat, the server's counters.

python client.py http://127.0.0.1:8000
"""

from __future__ import annotations

import json
import sys
from urllib.request import urlopen

from openai import OpenAI


def main(server: str) -> None:
    with OpenAI(base_url=f"{server}/v1", api_key="any") as client:
        model = client.models.list().data[0].id
        prompt = "Every line of this text says the same. " * 30

        # The server's settings. What compression did to the request comes with the answer.
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=200, temperature=0)
        print("completion:", answer.usage.completion_tokens, "tokens,", answer.kv_transfer_params)

        # Settings of one request: vLLM hands on text, so an object goes as JSON; "off" switches it off.
        smaller = {"vllm_xargs": {"kv_compression": json.dumps({"budget": 192})}}
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=200,
            temperature=0,
            stream=True,
            extra_body=smaller,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        print("streamed chat:", len(text), "characters")

    with urlopen(f"{server}/metrics") as page:
        for line in page.read().decode().splitlines():
            if line.startswith("kvreclaim_") and "_created" not in line:
                print(line)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
