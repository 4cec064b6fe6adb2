"""The recipes of docs/scaling.md run: scikit-learn always, the others where their packages are installed."""

from __future__ import annotations

import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

import pullback as pb

PAGE = (Path(__file__).parent.parent / "docs" / "scaling.md").read_text()


def recipe(heading: str) -> str:
    """The code under a heading."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n### ")[0].split("\n## ")[0]
    return "\n".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


def run(heading: str, **given: object) -> types.SimpleNamespace:
    exec(compile(recipe(heading), heading, "exec"), given)
    return types.SimpleNamespace(**given)


def groups() -> tuple[Tensor, np.ndarray]:
    """Two groups of codes, and who is in which."""
    labels = np.repeat([0, 1], 12)
    noise = 0.3 * torch.randn(24, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return noise + 3 * torch.from_numpy(labels)[:, None], labels


@pytest.fixture(scope="module")
def problem() -> dict[str, object]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 20)).double().requires_grad_(False)
    codes, labels = groups()
    return {
        "pb": pb,
        "codes": codes,
        "labels": labels,
        "metric": pb.FisherRaoMetric(lambda z: Bernoulli(logits=network(z))),
    }


def agree(found: np.ndarray, labels: np.ndarray) -> bool:
    """Whether two groupings are the same up to names."""
    return (
        len(set(zip(found.tolist(), labels.tolist(), strict=True)))
        == len(set(labels.tolist()))
        == len(set(found.tolist()))
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The number of connected components:UserWarning")
def test_scikit_learn(problem):
    found = run("scikit-learn", **problem)
    for name in ("dbscan", "hdbscan", "agglomerative"):
        assert agree(getattr(found, name), problem["labels"]), name
    assert found.accuracy == 1.0
    for name in ("mds", "isomap", "tsne"):
        assert getattr(found, name).shape == (24, 2)
        assert np.isfinite(getattr(found, name)).all()
    # Neighbors by the sparse matrix are those by the dense one.
    np.testing.assert_array_equal(found.sparse_labels, found.dense_labels)


@pytest.mark.filterwarnings("ignore")
def test_scanpy(problem):
    anndata = pytest.importorskip("anndata")
    pytest.importorskip("scanpy")
    pytest.importorskip("leidenalg")
    adata = anndata.AnnData(np.zeros((24, 1), np.float32), obsm={"X_latent": problem["codes"].numpy()})
    found = run("AnnData and scanpy", **problem, adata=adata)
    assert set(found.adata.obsp) == {"pullback_distances", "pullback_connectivities"}
    assert found.adata.uns["pullback"]["connectivities_key"] == "pullback_connectivities"
    leiden = found.adata.obs["leiden"].astype(int).to_numpy()
    # No cluster mixes the two groups.
    assert all(len(set(problem["labels"][leiden == c])) == 1 for c in set(leiden.tolist()))
    assert found.adata.obs["dpt_pseudotime"].iloc[0] == 0


@pytest.mark.filterwarnings("ignore")
def test_umap_learn(problem):
    """Slow where it runs: umap-learn compiles itself for half a minute."""
    pytest.importorskip("umap")
    found = run("umap-learn", **problem)
    assert found.embedding.shape == (24, 2)
    assert np.isfinite(found.embedding).all()


@pytest.mark.filterwarnings("ignore")
def test_scvi_tools():
    """The decoder is that of the model: the same likelihood of counts. Slow where it runs: a small model is trained."""
    anndata, scvi = pytest.importorskip("anndata"), pytest.importorskip("scvi")
    source = np.random.default_rng(0)
    counts = source.poisson(source.gamma(2, 2, (3, 30))[np.repeat([0, 1, 2], 20)]).astype(np.float32)
    adata = anndata.AnnData(counts)
    scvi.model.SCVI.setup_anndata(adata)
    model = scvi.model.SCVI(adata, n_latent=4, n_hidden=16, gene_likelihood="nb")
    model.train(max_epochs=5, accelerator="cpu", enable_progress_bar=False, logger=False)
    found = run("scvi-tools", pb=pb, model=model)
    with torch.no_grad():
        some, x = found.codes[:5], torch.from_numpy(counts[:5]).double()
        inputs = {"library": found.library.expand(5, 1), "batch_index": found.batch.expand(5, 1)}
        theirs = model.module.generative(z=some, **inputs)["px"]
        torch.testing.assert_close(found.decoder(some).log_prob(x), theirs.log_prob(x), rtol=1e-6, atol=1e-6)
    assert pb.neighbors(found.metric, found.codes, 3, n_jobs=1).certified.all()
