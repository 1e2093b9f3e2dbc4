// Package nfsvolume is the plugin of nfs volumes. The kernel's NFS client mounts a directory of a
// server for each pod, without mount.nfs(8).
package nfsvolume
