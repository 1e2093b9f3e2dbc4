// Package e2e runs Trivet in a real Kubernetes cluster: the rendered manifests, the chart and the
// examples unmodified. It kills the driver, drains a node, upgrades the chart, and makes mistakes
// in the configuration.
//
// The tests have the build tag e2e. They need a cluster of two nodes (KUBECONFIG) and run beside
// its control plane, where they see the processes, mounts and files of both nodes. test/e2e/run
// creates such a cluster with disks and starts the tests there.
package e2e
