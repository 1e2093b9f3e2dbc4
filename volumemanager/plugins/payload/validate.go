package payload

import (
	"path"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Bounds of a token's lifetime in seconds, as in the TokenRequest API.
const (
	minTokenSeconds = 600
	maxTokenSeconds = 1 << 32
)

// maxName is NAME_MAX. maxPath is below PATH_MAX, with room for the path of the volume. Both are in
// bytes.
const (
	maxName = 255
	maxPath = 2048
)

// validate checks the volume without the objects that it refers to.
func (m *mounter) validate() error {
	if err := checkMode(field.NewPath("defaultMode"), m.projection.DefaultMode); err != nil {
		return err
	}
	for i, source := range m.projection.Sources {
		if err := m.validateSource(m.sourceField(i), source); err != nil {
			return err
		}
	}
	if m.name != projectedName {
		return nil
	}
	return m.checkDistinct()
}

// checkDistinct refuses two items of a projected volume with one path, as an API server does.
func (m *mounter) checkDistinct() error {
	taken := map[string]bool{}
	for i, source := range m.projection.Sources {
		for _, path := range itemPaths(source) {
			if taken[path] {
				return plugins.Invalidf("%s: path %q: another item has the same path: give each its own path", m.sourceField(i), path)
			}
			taken[path] = true
		}
	}
	return nil
}

// itemPaths returns the paths in the items of a source.
func itemPaths(s corev1.VolumeProjection) (paths []string) {
	var items []corev1.KeyToPath
	switch {
	case s.ConfigMap != nil:
		items = s.ConfigMap.Items
	case s.Secret != nil:
		items = s.Secret.Items
	case s.DownwardAPI != nil:
		for _, item := range s.DownwardAPI.Items {
			paths = append(paths, item.Path)
		}
	}
	for _, item := range items {
		paths = append(paths, item.Path)
	}
	return paths
}

func (m *mounter) validateSource(at *field.Path, s corev1.VolumeProjection) error {
	known := []bool{s.ConfigMap != nil, s.Secret != nil, s.DownwardAPI != nil, s.ServiceAccountToken != nil}
	switch {
	case s.ClusterTrustBundle != nil || s.PodCertificate != nil:
		return plugins.Invalidf("%s: clusterTrustBundle and podCertificate need an API server: remove the source, or use a secret", at)
	case len(slices.DeleteFunc(known, func(set bool) bool { return !set })) != 1:
		return plugins.Invalidf("%s: want one of configMap, secret, downwardAPI and serviceAccountToken", at)
	case s.ConfigMap != nil:
		return checkObject(at.Child("configMap"), s.ConfigMap.Name, s.ConfigMap.Items)
	case s.Secret != nil:
		return checkObject(at.Child("secret"), s.Secret.Name, s.Secret.Items)
	case s.DownwardAPI != nil:
		return m.checkPodValues(at.Child("downwardAPI", "items"), s.DownwardAPI.Items)
	}
	return checkToken(at.Child("serviceAccountToken"), s.ServiceAccountToken)
}

// checkObject checks the name and the items of a source of kind ConfigMap or Secret.
func checkObject(at *field.Path, name string, items []corev1.KeyToPath) error {
	if name == "" {
		return plugins.Invalidf("%s: the name is missing: set it", at)
	}
	for i, item := range items {
		if err := checkItem(at.Child("items").Index(i), item.Path, item.Mode); err != nil {
			return err
		}
	}
	return nil
}

// checkPodValues checks downwardAPI items.
func (m *mounter) checkPodValues(at *field.Path, items []corev1.DownwardAPIVolumeFile) error {
	for i, item := range items {
		if err := checkItem(at.Index(i), item.Path, item.Mode); err != nil {
			return err
		}
		if _, err := m.podValue(at.Index(i), item); err != nil {
			return err
		}
	}
	return nil
}

func checkToken(at *field.Path, t *corev1.ServiceAccountTokenProjection) error {
	if s := t.ExpirationSeconds; s != nil && (*s < minTokenSeconds || *s > maxTokenSeconds) {
		return plugins.Invalidf("%s.expirationSeconds %d: want at least %d and at most %d", at, *s, minTokenSeconds, maxTokenSeconds)
	}
	return checkPath(at.Child("path"), t.Path)
}

func checkItem(at *field.Path, path string, mode *int32) error {
	if err := checkPath(at.Child("path"), path); err != nil {
		return err
	}
	return checkMode(at.Child("mode"), mode)
}

func checkMode(at *field.Path, mode *int32) error {
	if mode != nil && (*mode < 0 || *mode > 0o777) {
		return plugins.Invalidf("%s %#o: want only permission bits, at most 0777 (511)", at, *mode)
	}
	return nil
}

// checkPath refuses a path that leads out of the volume or into its hidden directories.
func checkPath(at *field.Path, name string) error {
	clean, parts := path.Clean(name), strings.Split(name, "/")
	tooLong := func(part string) bool { return len(part) > maxName }
	switch {
	case clean == ".", path.IsAbs(name), strings.HasPrefix(clean, hidden), slices.Contains(parts, ".."), strings.ContainsRune(name, 0):
		return plugins.Invalidf("%s %q: want a path relative to the volume that does not begin with \"..\", and has no part \"..\": change the path", at, name)
	case len(name) > maxPath, slices.ContainsFunc(parts, tooLong):
		return plugins.Invalidf("%s has %d bytes: want at most %d, and at most %d between two slashes: shorten the path", at, len(name), maxPath, maxName)
	}
	return nil
}
