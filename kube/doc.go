// Package kube is what the driver and the doctor ask of Kubernetes: the few
// objects that concern a CSI driver, the startup taint of a node, whether the
// kubelet's directory is where it should be, which nodes have a driver and where
// (WatchHosts), and the certificates by which a controller and its nodes know each
// other (KeepAuthority on the controller's side, Enrol on the node's).
//
// What certificates say is package pki's; here is how they come to where they are
// used. The CA is in a Secret that only the controller may read, the certificates
// to trust are in a ConfigMap, and a node asks for its own by a
// CertificateSigningRequest, made with the token of its pod: the API server itself
// vouches for the node.
//
// It reads objects through the dynamic client, and Nodes through the metadata
// client, into structures that have only the fields in use, and keeps no more of
// them in memory: the complete types would double what the client adds to the
// binary. Informers are made by hand for the same reason: client-go's factories of
// them, dynamic ones too, know all types.
//
// What changes is watched. Everything is tried again until it succeeds, and an
// error is logged once while it stays the same. Nothing of a volume's life depends
// on this package: while the API server is away, hosts and certificates stay as
// they are.
package kube
