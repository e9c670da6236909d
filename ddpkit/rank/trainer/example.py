"""What `ddpkit train` trains by default: a small transformer, on synthetic text that needs no download."""

from __future__ import annotations

import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, Subset

from ddpkit.settings.training import TrainConfig

Sample = tuple[torch.Tensor, torch.Tensor]


class SmallTransformer(nn.Module):
    """A causal language model: it predicts each token from those before it.

    It uses vocab_size, hidden_size, num_layers, num_heads, dropout, and seq_len as the longest text, of `config`. Every
    parameter takes part in every step. FSDP gathers `blocks` one by one.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.longest = config.seq_len
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.seq_len, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, config.num_heads, 4 * width, config.dropout, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, length), int64, to logits (batch, length, vocab_size).

        Raises:
            ValueError: the text is longer than seq_len.
        """
        length = tokens.shape[1]
        if length > self.longest:
            raise ValueError(
                f"SmallTransformer: a text of {length} tokens was given, and the model knows {self.longest} positions; "
                "raise data.seq_len, or cut the text."
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        hidden = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=hidden, is_causal=True)
        return self.head(self.norm(x))


class SyntheticTokens(Dataset[Sample]):
    """Texts where each token has one successor: token * a + b, modulo the vocabulary.

    A sample is (inputs, targets), both (seq_len,) int64; targets are the inputs one token on. It depends on `seed` and its
    index alone. A model can learn `a` and `b`: the loss falls from log(vocab_size) towards 0.
    """

    def __init__(self, size: int, seq_len: int, vocab_size: int, seed: int = 0) -> None:
        self.size, self.seq_len, self.vocab_size, self.seed = size, seq_len, vocab_size, seed
        rule = random.Random(seed)
        # Coprime to the vocabulary, so no two tokens have the same successor.
        self.a = next(a for a in iter(lambda: rule.randrange(1, vocab_size), None) if math.gcd(a, vocab_size) == 1)
        self.b = rule.randrange(vocab_size)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(f"SyntheticTokens: there is no sample {index}; there are {self.size}.")
        text = [random.Random(f"{self.seed} {index}").randrange(self.vocab_size)]
        for _ in range(self.seq_len):
            text.append((text[-1] * self.a + self.b) % self.vocab_size)
        tokens = torch.tensor(text)
        return tokens[:-1], tokens[1:]


def datasets(config: TrainConfig) -> tuple[Subset[Sample], Subset[Sample] | None]:
    """The texts to train on, and those held out for evaluation (None if `config` holds none out)."""
    texts = SyntheticTokens(config.dataset_size, config.seq_len, config.vocab_size, config.seed)
    held_out = Subset(texts, range(config.train_size, config.dataset_size)) if config.eval_size else None
    return Subset(texts, range(config.train_size)), held_out


def language_model_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over all tokens: logits (batch, length, vocab_size), targets (batch, length)."""
    # In fp32 even under autocast: a sum over a large vocabulary loses too much in 16 bits.
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
