"""The contract of a project, its hash, and the difference between two contracts."""

from isthmus.features.contract.schema import (
    Column,
    Contract,
    FieldRule,
    ServiceContract,
    TransformContract,
    ViewContract,
    sha256,
)

__all__ = ["Column", "Contract", "FieldRule", "ServiceContract", "TransformContract", "ViewContract", "sha256"]
