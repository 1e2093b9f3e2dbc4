// Package e2e tests Trivet in a real Kubernetes cluster, with the unmodified manifests, chart and examples.
// The tests also kill drivers and kubelets, drain a node, upgrade the chart, and make mistakes in the
// configuration.
//
// The tests have the build tag e2e. They need a cluster of two nodes (KUBECONFIG) whose control plane runs on
// the same machine in namespaces where the processes, mounts and files of both nodes are visible.
// test/e2e/run creates such a cluster and starts the tests.
package e2e
