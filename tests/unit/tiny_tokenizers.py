"""Tiny real tokenizers of the kinds that models use, made on the spot."""

import itertools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "stop here. STOP there! um, well, hello world; hello there",
    "żółć naïve 日本語 日本 語 😀😃 👩‍👩‍👧",
] * 4
BOS, EOS = "<s>", "</s>"


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """GPT-2, Llama 3, Qwen, SmolLM: byte-level BPE, whose tokens may cut a character anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def straddling() -> Tokenizer:
    """Byte-level, with merges that end one character and begin the next: a text of such tokens is never clean."""
    to_byte = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {BOS: 0, EOS: 1} | {char: index for index, char in enumerate(to_byte, 2)}
    sample = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("語日é")[0][0]
    merges = list(dict.fromkeys(itertools.pairwise(sample)))
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return tokenizer


def llama() -> Tokenizer:
    """Llama 2, Mistral: SentencePiece BPE with byte fallback; the first word's leading space is not part of the text."""
    vocab = {"<unk>": 0, BOS: 1, EOS: 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for piece in (
        "▁",
        "▁▁",
        "▁t",
        "he",
        "▁the",
        "▁hello",
        "er",
        "o",
        "s",
        "t",
        "p",
        "▁st",
        "op",
        "日",
        ".",
        "▁.",
        "h",
        "e",
    ):
        vocab[piece] = len(vocab)
    merges = [("▁", "▁"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "p"), ("▁", ".")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", BOS, EOS)])
    return tokenizer


def metaspace() -> Tokenizer:
    """T5, XGLM: Unigram-like pieces under a ``Metaspace`` decoder."""
    tokenizer = llama()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
