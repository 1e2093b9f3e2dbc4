// Package pki is who is who in an installation: an authority, certificates that
// name the controller or one node, the directory in which a process has its own,
// and the TLS 1.3 configurations by which each side accepts the other alone.
//
// It knows neither gRPC nor Kubernetes: how a request reaches the authority, and a
// certificate the node, is somebody else's.
package pki
