// Package backend is the contract between the CSI services and the kinds of storage, the registry
// of the kinds, and the code that several kinds share.
//
// The features beyond Backend are optional interfaces, found by type assertion. The driver
// advertises the features that some kind has. No service distinguishes kinds by name, and no
// backend imports gRPC or another backend.
package backend
