"""What kustomize makes of a folder: resources, components and patches, as far as deploy/kubernetes uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
Manifests = dict[tuple[str, str], Manifest]
"""By kind and name."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Tests read these files hundreds of times; libyaml does so ten times as fast."""

_KEYS = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath", "ports": "containerPort"}


def kustomized(folder: Path, onto: Manifests | None = None) -> Manifests:
    """Everything that applying the folder would make; a component's patches are put `onto` what there is."""
    found: Manifests = {} if onto is None else onto
    (asked,) = documents(folder / "kustomization.yaml")
    for entry in (folder / name for name in asked.get("resources", [])):
        more = kustomized(entry) if entry.is_dir() else {named(one): one for one in documents(entry)}
        assert not found.keys() & more.keys()
        found |= more
    for patch in asked.get("patches", []):
        for one in documents(folder / patch["path"]):
            found[named(one)] = merged(found[named(one)], one)
    for name in asked.get("components", []):
        kustomized(folder / name, found)
    return found


def documents(file: Path) -> list[Manifest]:
    return list(yaml.load_all(file.read_text(), LOADER))


def named(one: Manifest) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def merged(old: Any, new: Any, field: str = "") -> Any:
    """A strategic merge: null takes away, lists of Kubernetes with a key are merged by it."""
    if isinstance(old, dict) and isinstance(new, dict):
        both = {**old, **{key: merged(old.get(key), value, key) for key, value in new.items()}}
        return {key: value for key, value in both.items() if value is not None}
    if isinstance(old, list) and isinstance(new, list) and (key := _KEYS.get(field)):
        entries = {one[key]: one for one in old}
        for one in new:
            entries[one[key]] = merged(entries.get(one[key]), one)
        return list(entries.values())
    return new
