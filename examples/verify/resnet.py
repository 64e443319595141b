"""A small ResNet with batch norm on scanned digits: the first stage of ResNet-18 and a head."""

import torch
from torch.utils.data import Subset

import shardwise as sw


def model():
    net = sw.models.resnet18(num_classes=10, in_channels=1, stem="small")
    net.stages = net.stages[:1]
    net.head = torch.nn.Linear(64, 10)
    return net


def data(split):
    return Subset(sw.datasets.digits(split), range(101)) if split == "train" else None


job = sw.Job(
    model=model,
    data=data,
    loss=sw.losses.cross_entropy,
    optimizer=sw.sgd(lr=0.05, momentum=0.9, weight_decay=1e-3),
    clip_norm=0.5,
    batch_size=40,
    steps=3,
)
