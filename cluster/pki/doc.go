// Package pki identifies the processes of an installation: an authority, certificates that name the
// controller or a node, the directory with a process's certificate, and TLS 1.3 configurations by
// which each side accepts only the other.
//
// It uses neither gRPC nor Kubernetes. Its users pass requests to the authority and certificates to the
// nodes.
package pki
