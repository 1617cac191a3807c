"""transformers and peft: BERT, GPT-2 with ``generate``, and LoRA adapters."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from tests.models.trial import Trained, Trial

WIDTH, WORDS = 32, 64


class _Texts(Trained):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net.train())

    def training_step(self, batch, batch_idx):
        return self.net(**batch).loss

    def validation_step(self, batch, batch_idx):
        return self.net(**batch).logits


class _Generates(_Texts):
    def validation_step(self, batch, batch_idx):
        loss = self.net(**batch).loss
        words = self.net.generate(batch["input_ids"], max_new_tokens=8, do_sample=False, pad_token_id=0)
        return loss, words


def bert(*, width: int = WIDTH):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=width, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * width,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lora():
    from peft import LoraConfig, get_peft_model

    # A TaskType would need the name of a pretrained model.
    return get_peft_model(bert(width=48), LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.0))


def texts(batches: int, *, labels: str, seed: int = 0) -> DataLoader:
    """Texts of varying length, padded to the longest of each batch of four; the last batch has three."""
    generator = torch.Generator().manual_seed(seed)
    data = []
    for _ in range(batches * 4 - 1):
        length = int(torch.randint(6, 24, (), generator=generator))
        data.append(torch.randint(2, WORDS, (length,), generator=generator))

    def collate(samples):
        words = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        batch = {"input_ids": words, "attention_mask": (words != 0).long()}
        batch["labels"] = (words.sum(1) % 2) if labels == "class" else words.masked_fill(words == 0, -100)
        return batch

    return DataLoader(data, batch_size=4, collate_fn=collate)


def same_length(batches: int, seed: int = 0) -> DataLoader:
    """Prompts of one length, as ``generate`` wants them, in batches of varying length."""
    generator = torch.Generator().manual_seed(seed)

    def batch(length: int):
        words = torch.randint(2, WORDS, (4, length), generator=generator)
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words.clone()}

    return DataLoader([batch(8 + i % 5) for i in range(batches)], batch_size=None)


def on_texts(name: str, make, *, labels: str, batches: int = 16, **settings) -> Trial:
    train, validate = lambda: texts(batches, labels=labels), lambda: texts(8, labels=labels, seed=1)
    return Trial(**{"name": name, "make": make, "train": train, "validate": validate} | settings)


TRIALS = [
    on_texts("BERT, padded to the longest", lambda: _Texts(bert()), labels="class", batches=24),
    on_texts(
        "GPT-2 with generate()",
        lambda: _Generates(gpt2()),
        labels="words",
        validate=lambda: same_length(6),
    ),
    on_texts("peft LoRA", lambda: _Texts(lora()), labels="class"),
]
