// Package kube is what the driver and the doctor ask of Kubernetes: the few
// objects that concern a CSI driver, the startup taint of a node, and whether the
// kubelet's directory is where it should be.
//
// It reads objects through the dynamic client into structures that have only the
// fields in use: the complete types would double what the client adds to the
// binary. Nothing of a volume's life depends on this package.
package kube
