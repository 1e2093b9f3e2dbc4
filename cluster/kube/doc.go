// Package kube is the client of the Kubernetes API for the driver and the doctor: the few
// objects that concern a CSI driver, the startup taint of a node, the checks of the kubelet's
// directory, the addresses of the drivers on nodes (WatchHosts), the record of pool owners
// (PoolOwners), and the distribution of the certificates by which controller and nodes identify
// each other (MaintainAuthority on the controller's side, Enrol on the node's).
//
// Package pki defines the content of the certificates; this package distributes them. The CA
// is in a Secret that only the controller may read. The trusted CA certificates are in a
// ConfigMap. A node requests its certificate by a CertificateSigningRequest with the token of
// its pod, so the API server itself vouches for the node.
//
// Objects are read through the dynamic client, and Nodes through the metadata client, into structures that
// contain only the fields in use. The complete types would double the size that the client adds to the binary.
// Informers are built by hand for the same reason: client-go's informer factories import all types.
//
// Failed calls are retried until they succeed. An error is logged once until another error or a success. No
// volume operation depends on this package: while the API server does not answer, hosts and certificates do not
// change.
package kube
