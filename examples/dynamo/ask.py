"""For a front end of your own: ask Fullhit where a chat should go, and say when it is over.

python ask.py http://127.0.0.1:8781 https://pictures.invalid/cat.png
"""

import json
import sys

from fullhit.client import Client


def main(router: str, picture: str) -> None:
    picture_part = {"type": "image_url", "image_url": {"url": picture}}
    body = {"model": "qwen-vl", "messages": [{"role": "user", "content": [picture_part]}]}
    with Client(router) as client:
        with client.select(openai_chat=json.dumps(body).encode(), lease_seconds=600) as choice:
            chosen = choice.selection
            instance = chosen.worker_id  # 64 bits; goes in decimal as x-dynamo-worker-instance-id
            print(f"send it to {instance} ({choice.reason}), then release {chosen.lease_id}")
        explanation = client.explain(chosen.decision_id)
        print(f"because: {explanation.why}")


if __name__ == "__main__":
    main(*sys.argv[1:])
