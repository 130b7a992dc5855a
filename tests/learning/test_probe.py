"""The linear probe, the classifier that starts from it, and rates that follow the size of a tensor."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import one_hot

from finetune_mile.learning.optim import make_optimizer, relative_groups, set_rate
from finetune_mile.learning.probe import fit_probe, folds, neighbour_votes
from finetune_mile.networks.heads import Features, StandardisedLinear, build, get_head, new_head, set_head
from finetune_mile.networks.parts import plain_head


def mixture(count, seed, features=24, classes=5):
    """Features of different scales, some of them constant, of classes that overlap."""
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(classes, (count,), generator=draw)
    x = centres[labels] * 0.5 + torch.randn(count, features, generator=draw)
    x[:, 3] = 7.0
    return x * torch.logspace(-2, 2, features) + 5, labels


@pytest.mark.parametrize(("activation", "scale"), [("softmax", 1.0), ("softmax", 20.0), ("sigmoid", 0.05)])
def test_it_classifies_and_the_scale_of_the_features_does_not_matter(activation, scale):
    x, labels = mixture(300, 0)
    others, truth = mixture(2000, 1)
    probe = fit_probe(x, one_hot(labels, 5), activation)
    scaled = fit_probe(x * scale, one_hot(labels, 5), activation)
    accuracy = (probe.logits(others).argmax(1) == truth).float().mean()
    assert accuracy > 0.75
    torch.testing.assert_close(scaled.logits(others * scale), probe.logits(others), rtol=0.02, atol=0.05)


@pytest.mark.slow  # importing lightly's benchmarks takes seconds
def test_neighbours_vote_as_those_of_lightly():
    from lightly.utils.benchmarking import knn_predict

    (bank, labels), (queries, _) = mixture(300, 0), mixture(1500, 1)
    unit = torch.nn.functional.normalize
    theirs = knn_predict(unit(queries, dim=1), unit(bank, dim=1).T, labels, num_classes=5, knn_k=20, knn_t=0.07)
    assert neighbour_votes(queries, bank, labels, 5).argmax(1).equal(theirs[:, 0])


def test_near_neighbours_have_a_larger_vote():
    bank = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.55, 0.8], [-1.0, 0.0]]) * 7
    labels, query = torch.tensor([0, 1, 1, 2]), torch.tensor([[3.0, 0.1]])
    assert neighbour_votes(query, bank, labels, 3).argmax(1).tolist() == [0]
    assert neighbour_votes(query, bank, labels, 3, temperature=10.0).argmax(1).tolist() == [1], (
        "of equal votes the majority wins"
    )
    assert neighbour_votes(query, bank, labels, 3, k=1, temperature=10.0).argmax(1).tolist() == [0]


def test_it_is_the_regularised_logistic_regression_of_scikit_learn():
    x, labels = mixture(400, 0)
    probe = fit_probe(x, one_hot(labels, 5), "softmax")
    z = ((x - probe.mean) * probe.scale).numpy()
    other = LogisticRegression(C=1 / (probe.strength * len(z)), tol=1e-8, max_iter=5000).fit(z, labels.numpy())
    theirs = torch.from_numpy(other.decision_function(z)).float().log_softmax(1)
    torch.testing.assert_close(probe.logits(x).log_softmax(1), theirs, rtol=0, atol=0.05)


def test_fewer_images_than_features_are_fitted_in_their_own_directions():
    x, labels = mixture(20, 0)
    probe = fit_probe(x, one_hot(labels, 5), "softmax")
    assert probe.weight.shape == (5, 24)
    assert (probe.logits(x).argmax(1) == labels).float().mean() > 0.6


def test_one_image_a_class_is_enough():
    x, labels = mixture(200, 0)
    first = [int((labels == label).nonzero()[0]) for label in range(5)]
    probe = fit_probe(x[first], one_hot(labels[first], 5), "sigmoid")
    assert probe.logits(x).isfinite().all()


def test_folds_hold_every_class_evenly():
    _, labels = mixture(503, 0)
    fold = torch.from_numpy(folds(labels.numpy(), 0))
    counts = torch.stack([torch.bincount(fold[labels == label], minlength=5) for label in range(5)])
    assert int((counts.max(1).values - counts.min(1).values).max()) <= 1


@pytest.mark.parametrize("arch", ["resnet-demo", "timm:vit_tiny_patch16_224"])
def test_a_standardised_classifier_folds_into_a_plain_one(arch):
    torch.manual_seed(0)
    network = build(arch)
    new_head(network, 7, "zero")
    head = StandardisedLinear(get_head(network).in_features, 7)
    head.mean.normal_()
    head.scale.uniform_(0.1, 3)
    set_head(network, head)
    images = torch.randn(2, 3, *(2 * [224 if "vit" in arch else 32]))
    network.eval()
    with torch.no_grad():
        logits, features = network(images), Features(network)(images)
        torch.testing.assert_close(head(features), logits)
        set_head(network, plain_head(network))
        assert type(get_head(network)) is torch.nn.Linear
        torch.testing.assert_close(network(images), logits, rtol=1e-4, atol=1e-4)


def test_a_relative_step_moves_every_tensor_by_a_share_of_its_size():
    torch.manual_seed(0)
    network = build("resnet-demo")
    new_head(network, 3, "prior")
    before = {name: tensor.detach().clone() for name, tensor in network.named_parameters()}
    optimizer = make_optimizer(
        "relative", relative_groups(network, lr=0.01, weight_decay=0.0), momentum=0.9, nesterov=False
    )
    set_rate(optimizer, 1.0)
    network(torch.randn(4, 3, 32, 32)).logsumexp(1).sum().backward()
    optimizer.step()
    for name, tensor in network.named_parameters():
        if tensor.ndim > 1 and tensor.grad.abs().min() > 0:  # Adam's first step is one rate in every number
            size = before[name].square().mean().sqrt()
            moved = (tensor - before[name]).abs()
            torch.testing.assert_close(moved, torch.full_like(moved, 0.01 * float(size)), rtol=1e-2, atol=1e-7)


def test_few_labels_do_not_choose_a_probe_that_knows_only_the_frequent_classes():
    draw = torch.Generator().manual_seed(0)
    counts = torch.tensor([8, 5, 4, 3, 3, 2, 2, 2, 1, 1])
    means = 0.2 * torch.randn(10, 256, generator=draw)
    labels, many = (torch.arange(10).repeat_interleave(counts * times) for times in (1, 20))
    features, more = (means[each] + torch.randn(len(each), 256, generator=draw) for each in (labels, many))
    fitted = fit_probe(features, one_hot(labels), "sigmoid")
    guesses = fitted.logits(more).argmax(1)
    assert guesses.unique().numel() >= 6  # 4 with the strength that the held-out labels like best
    assert (guesses == many).double().mean() > 0.35  # 0.31 with it; the most frequent class alone has 0.26
