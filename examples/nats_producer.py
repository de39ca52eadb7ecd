"""Ask pdq for a completion over NATS alone: python nats_producer.py MODEL PROMPT (the server is $PDQ_NATS_URL)."""

import asyncio, json, os, re, sys, nats  # noqa: E401, I001


async def main(model: str, prompt: str) -> None:
    client = await nats.connect(os.environ.get("PDQ_NATS_URL", "nats://127.0.0.1:4222"))
    inbox, tokens = client.new_inbox(), []
    answers = await client.subscribe(inbox)
    subject = re.sub(rb"[^A-Za-z0-9_-]", lambda byte: b"=%02X" % byte[0][0], model.encode()).decode()
    job = {"model": model, "prompt": prompt, "reply_to": inbox, "sampling": {"max_tokens": 64}}
    stored = await client.jetstream().publish(f"pdq.jobs.prefill.{subject}.interactive", json.dumps(job).encode())
    mine = {"model": model, "stream": stored.stream, "sequence": stored.seq, "reply_to": inbox}

    async def ask() -> None:  # what has become of the job? What is missing here is sent again
        question = {"type": "status_question", **mine, "next_seq": len(tokens)}
        await client.publish("pdq.status", json.dumps(question).encode(), reply=inbox)

    while True:
        try:
            message = await answers.next_msg(timeout=5)
        except nats.errors.TimeoutError:
            await ask()
            continue
        body = json.loads(message.data or "{}")  # empty: there was nobody to be asked
        if body.get("type") == "output_question":  # another worker takes over, and asks which tokens have arrived
            await message.respond(json.dumps({**body, "wanted": True, "tokens": tokens}).encode())
        if body.get("state") == "unknown":
            sys.exit("the job was turned away, or it is over since long")
        for entry in body.get("entries", []):
            if entry["seq"] > len(tokens):
                await ask()
                break
            new = len(tokens) - entry["seq"]  # below this index: tokens that are here already
            tokens += entry.get("tokens", [])[new:]
            print(*entry.get("pieces", [])[new:], sep="", end="", flush=True)
            if end := entry.get("end"):
                sys.exit(end.get("error", {}).get("message") or print(end.get("tail", "")))


asyncio.run(main(*sys.argv[1:]) if len(sys.argv) == 3 else sys.exit(__doc__))
