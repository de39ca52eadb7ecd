"""Ask pdq for a completion over NATS alone: python nats_producer.py MODEL PROMPT (the server is $PDQ_NATS_URL)."""

import asyncio, json, os, re, sys, nats  # noqa: E401, I001


async def main(model: str, prompt: str) -> None:
    client = await nats.connect(os.environ.get("PDQ_NATS_URL", "nats://127.0.0.1:4222"))
    inbox, tokens = client.new_inbox(), []
    answers = await client.subscribe(inbox)
    subject = re.sub(rb"[^A-Za-z0-9_-]", lambda byte: b"=%02X" % byte[0][0], model.encode()).decode()
    job = {"model": model, "prompt": prompt, "reply_to": inbox, "sampling": {"max_tokens": 64}}
    await client.jetstream().publish(f"pdq.jobs.prefill.{subject}.interactive", json.dumps(job).encode())
    async for message in answers.messages:
        body = json.loads(message.data)
        if message.reply:  # another worker takes over, and asks which tokens have arrived
            await message.respond(json.dumps({**body, "wanted": True, "tokens": tokens}).encode())
        for entry in body.get("entries", []):
            new = len(tokens) - entry["seq"]  # below this index: tokens that are here already
            tokens += entry.get("tokens", [])[new:]
            print(*entry.get("pieces", [])[new:], sep="", end="", flush=True)
            if end := entry.get("end"):
                sys.exit(end.get("error", {}).get("message") or print(end.get("tail", "")))


asyncio.run(main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__))
