// Package kube is the client of the Kubernetes API for the driver and the doctor. It reads the few
// objects that concern a CSI driver, removes the startup taint of a node, checks the kubelet's
// directory, watches the addresses of the drivers on nodes (WatchHosts), records the owners of pools
// (PoolOwners), and distributes the certificates with which controller and nodes identify themselves
// to each other (MaintainAuthority runs in the controller, Enrol on each node). NodeLoss deletes the claims of nodes that do
// not exist any more. TransferEvents creates events about transfers. ClassProtection finds the claims of which copies on another node
// must be kept.
//
// For kubectl trivet, it reads and writes claims, PersistentVolumes, snapshots and pods with the rights of a user.
//
// Package pki defines the content of the certificates; this package distributes them. The CA
// is in a Secret that only the controller may read. The trusted CA certificates are in a
// ConfigMap. A node requests its certificate by a CertificateSigningRequest, which it creates with the
// token of its pod. The API server adds the pod to the request, so the node cannot request a certificate
// for another node.
//
// Objects are read through the dynamic client, and Nodes through the metadata client, into structures that
// contain only the fields in use. The complete types would double the size that the client adds to the binary. Only placement.go
// uses some of them, which the functions of the scheduler need.
// Informers are built by hand for the same reason: client-go's informer factories import all types.
//
// Failed calls are retried until they succeed. If the same error repeats, it is logged once. No call of CSI
// depends on this package: while the API server does not answer, hosts and certificates do not
// change.
package kube
