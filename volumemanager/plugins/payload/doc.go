// Package payload has the plugins of volumes whose content comes from manifests:
// configMap, secret, downwardAPI, and projected, which has all of them and service-account
// tokens. Content is replaced as a whole by one rename, so that who reads through one
// opened directory, or one link resolved, sees old content or new. All but configMap is in
// memory that is not swapped out where the kernel can see to that, and on no disk.
//
// Nothing here remembers anything: what a volume has is read from where it is mounted.
package payload
