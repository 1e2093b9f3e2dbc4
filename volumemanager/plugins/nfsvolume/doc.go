// Package nfsvolume is the plugin of nfs volumes: directories of a server, mounted for each
// pod by the kernel's client, without mount.nfs(8).
package nfsvolume
