"""The SDK: manifests, scaffold, conformance kit and test doubles."""
