// Package nfsunmount takes NFS mounts away, also those of servers that are silent.
package nfsunmount
