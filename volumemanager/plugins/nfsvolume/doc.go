// Package nfsvolume is the plugin of nfs volumes: directories of a server that the kernel's client
// mounts for each pod, without mount.nfs(8).
package nfsvolume
