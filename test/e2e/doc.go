// Package e2e runs Trivet in a real Kubernetes, as its users do: the rendered
// manifests and the chart unmodified, the examples as they stand, the driver
// killed, the node drained, the chart upgraded, and the days on which somebody
// configured something wrong.
//
// The tests have the build tag e2e, want a cluster of two nodes (KUBECONFIG) and run
// beside its control plane, where they see the processes, mounts and files of both:
// test/e2e/run brings such a cluster up, gives its nodes disks, and starts them there.
package e2e
