// Package pki identifies the processes of an installation by certificates. It contains the certificate
// authority, the names of the controller and the nodes in certificates, the directory of a process's own
// certificate, and TLS 1.3 configurations with which controller and node accept only each other.
//
// It uses neither gRPC nor Kubernetes. The callers transfer certificate requests from the nodes to the
// authority, and certificates back.
package pki
