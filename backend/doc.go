// Package backend is the contract between the CSI services and the kinds of
// storage, the registry in which the services find them, and what those have in
// common that keep their volumes in pools.
//
// What a backend can do beyond the contract are optional interfaces, found by
// type assertion; what the driver advertises is computed from them. No service
// asks which backend it has, and no backend knows gRPC or another backend.
package backend
