package plugins

import (
	"errors"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
)

// Paths are the paths of a kubelet below its root directory, by default /var/lib/kubelet. Drivers,
// registrars and other programs depend on them.
type Paths struct{ Root string }

// Pods returns the directory of all pods. The name of a pod's directory is its UID.
func (p Paths) Pods() string { return filepath.Join(p.Root, "pods") }

// Pod returns the directory of a pod.
func (p Paths) Pod(uid types.UID) string { return filepath.Join(p.Pods(), string(uid)) }

// PodVolumes returns the directory of a pod's volumes of one plugin.
func (p Paths) PodVolumes(uid types.UID, plugin string) string {
	return filepath.Join(p.Pod(uid), "volumes", Escape(plugin))
}

// PodVolume returns the directory of one volume of a pod.
func (p Paths) PodVolume(uid types.UID, plugin, name string) string {
	return filepath.Join(p.PodVolumes(uid, plugin), name)
}

// CheckedPodVolume is PodVolume for unvalidated parameters. It returns an *InvalidError if uid or name
// is not a valid path component.
func (p Paths) CheckedPodVolume(uid types.UID, plugin, name string) (string, error) {
	return p.PodVolume(uid, plugin, name), checkNames(uid, name)
}

// CheckedPodDevice is PodDevice with the validation of CheckedPodVolume.
func (p Paths) CheckedPodDevice(uid types.UID, plugin, name string) (string, error) {
	return p.PodDevice(uid, plugin, name), checkNames(uid, name)
}

func checkNames(uid types.UID, name string) error {
	return errors.Join(CheckPart("metadata.uid", string(uid)), CheckPart("volume", name))
}

// PodDevice returns the path of the symbolic link to a raw device of a pod.
func (p Paths) PodDevice(uid types.UID, plugin, name string) string {
	return filepath.Join(p.Pod(uid), "volumeDevices", Escape(plugin), name)
}

// PodPlugin returns the directory for a plugin's own files that belong to one pod.
func (p Paths) PodPlugin(uid types.UID, plugin string) string {
	return filepath.Join(p.Pod(uid), "plugins", Escape(plugin))
}

// PodSubPaths returns the directory that contains the mounts of a volume's subPaths, each at
// <container>/<index of the volumeMount>. The parameter name is Spec.Name.
func (p Paths) PodSubPaths(uid types.UID, name string) string {
	return filepath.Join(p.Pod(uid), "volume-subpaths", name)
}

// Plugin returns the directory for a plugin's files that belong to all pods.
func (p Paths) Plugin(plugin string) string { return filepath.Join(p.Root, "plugins", plugin) }

// Escape returns the directory name for a plugin's name, such as kubernetes.io~csi.
func Escape(plugin string) string { return strings.ReplaceAll(plugin, "/", "~") }

// Unescape undoes Escape.
func Unescape(dir string) string { return strings.ReplaceAll(dir, "~", "/") }

// CheckPart returns an *InvalidError if the value of a field is not a valid path component.
func CheckPart(field, value string) error {
	if value == "" || value == "." || value == ".." || len(value) > 253 || strings.ContainsAny(value, "/\x00") {
		return Invalidf("%s %q: want a file name without slashes, other than . and .., of at most 253 bytes", field, value)
	}
	return nil
}

// CheckAbsolute returns an *InvalidError if the value of a field is not an absolute path without
// "..".
func CheckAbsolute(field, path string) error {
	if !filepath.IsAbs(path) || slices.Contains(strings.Split(path, "/"), "..") || strings.ContainsRune(path, 0) {
		return Invalidf("%s %q: want an absolute path without ..", field, path)
	}
	return nil
}

// maxSocket is the maximum length of the path of a Unix socket in bytes (unix(7), sun_path without
// the terminating zero).
const maxSocket = 107

// CheckSocket returns an *InvalidError if a path is too long for a Unix socket.
func CheckSocket(path string) error {
	if len(path) > maxSocket {
		return Invalidf("the path of socket %s has %d bytes, and the maximum is %d: use directories with shorter names", path, len(path), maxSocket)
	}
	return nil
}
