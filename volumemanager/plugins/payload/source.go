package payload

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/downward"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const (
	// defaultFileMode is the default of an API server.
	defaultFileMode = fs.FileMode(corev1.ProjectedVolumeSourceDefaultMode)
	// tokenMode is the mode of a token whose user or group is known.
	tokenMode = 0o600
	// dirMode is the mode of directories without an fsGroup, groupDirMode with an fsGroup.
	dirMode, groupDirMode = fs.ModeDir | 0o755, fs.ModeDir | fs.ModeSetgid | 0o755
	// groupMode contains the mode bits that a kubelet adds for a pod's fsGroup in read-only volumes.
	groupMode = 0o440
)

// content returns the content of the volume, with owners and modes.
func (m *mounter) content(args plugins.MounterArgs) (tree, error) {
	w := &writer{tree: tree{"": {mode: dirMode}}, mode: m.projection.DefaultMode, group: args.FSGroup}
	if args.FSGroup != nil {
		w.tree[""] = node{mode: groupDirMode, gid: int(*args.FSGroup)}
	}
	for i, source := range m.projection.Sources {
		if err := m.project(w, m.sourceField(i), source); err != nil {
			return nil, err
		}
	}
	return w.tree, nil
}

// project adds the files of a source. at is the field of the source.
func (m *mounter) project(w *writer, at *field.Path, source corev1.VolumeProjection) error {
	switch {
	case source.ConfigMap != nil:
		s := source.ConfigMap
		return m.projectObject(w, object{at.Child("configMap"), "ConfigMap", m.configMap, s.Name, s.Items, s.Optional})
	case source.Secret != nil:
		s := source.Secret
		return m.projectObject(w, object{at.Child("secret"), "Secret", m.secret, s.Name, s.Items, s.Optional})
	case source.DownwardAPI != nil:
		return m.projectPod(w, at.Child("downwardAPI"), source.DownwardAPI.Items)
	default:
		return m.projectToken(w, at.Child("serviceAccountToken"), source.ServiceAccountToken)
	}
}

// writer collects the files of a volume.
type writer struct {
	tree tree
	// mode is the volume's defaultMode, or nil.
	mode *int32
	// group is the pod's fsGroup, or nil.
	group *int64
}

// add adds a file. A nil user is root.
func (w *writer) add(at *field.Path, name, data string, mode fs.FileMode, user *int64) error {
	n := node{mode: mode, data: data}
	if user != nil {
		n.uid = int(*user)
	}
	if w.group != nil {
		n.gid = int(*w.group)
		n.mode |= groupMode
	}
	return w.tree.add(at, name, n)
}

// fileMode returns the mode of an item. If item is nil, it returns the default mode of the volume.
func (w *writer) fileMode(item *int32) fs.FileMode {
	switch {
	case item != nil:
		return fs.FileMode(*item)
	case w.mode != nil:
		return fs.FileMode(*w.mode)
	}
	return defaultFileMode
}

// object is a source of kind ConfigMap or Secret.
type object struct {
	// at is the field of the source.
	at   *field.Path
	kind string
	// get returns the data of the object.
	get      func(name string) (map[string]string, error)
	name     string
	items    []corev1.KeyToPath
	optional *bool
}

// projectObject adds the files of a ConfigMap or Secret.
func (m *mounter) projectObject(w *writer, o object) error {
	optional := o.optional != nil && *o.optional
	data, err := o.get(o.name)
	switch {
	case errors.Is(err, plugins.ErrNotFound) && optional:
		return nil
	case errors.Is(err, plugins.ErrNotFound):
		return fmt.Errorf("%s: %s %s/%s: %w: add it, or set optional: true", o.at, o.kind, m.pod.Namespace, o.name, err)
	case err != nil:
		return fmt.Errorf("%s: %s %s/%s: %w", o.at, o.kind, m.pod.Namespace, o.name, err)
	}
	if len(o.items) == 0 {
		return w.addKeys(o, data)
	}
	for i, item := range o.items {
		value, ok := data[item.Key]
		if !ok && optional {
			continue
		}
		at := o.at.Child("items").Index(i)
		if !ok {
			return fmt.Errorf("%s.key %q: %s %s/%s has no such key: add it, or set optional: true", at, item.Key, o.kind, m.pod.Namespace, o.name)
		}
		if err := w.add(at, item.Path, value, w.fileMode(item.Mode), nil); err != nil {
			return err
		}
	}
	return nil
}

// addKeys adds a file for each key of an object.
func (w *writer) addKeys(o object, data map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(data)) {
		if problems := validation.IsConfigMapKey(key); len(problems) > 0 {
			return plugins.Invalidf("%s: %s %s: key %q: %s: rename the key, or give it a path (items)", o.at, o.kind, o.name, key, strings.Join(problems, "; "))
		}
		if err := w.add(o.at, key, data[key], w.fileMode(nil), nil); err != nil {
			return err
		}
	}
	return nil
}

// configMap returns the data of a ConfigMap in the pod's namespace.
func (m *mounter) configMap(name string) (map[string]string, error) {
	o, err := m.host.ConfigMap(m.pod.Namespace, name)
	if err != nil {
		return nil, err
	}
	data := plugins.Strings(o.BinaryData)
	maps.Copy(data, o.Data)
	return data, nil
}

// secret returns the data of a Secret in the pod's namespace.
func (m *mounter) secret(name string) (map[string]string, error) {
	o, err := m.host.Secret(m.pod.Namespace, name)
	if err != nil {
		return nil, err
	}
	return plugins.Strings(o.Data), nil
}

// projectPod adds the files of downwardAPI items.
func (m *mounter) projectPod(w *writer, at *field.Path, items []corev1.DownwardAPIVolumeFile) error {
	for i, item := range items {
		at := at.Child("items").Index(i)
		value, err := m.podValue(at, item)
		if err != nil {
			return err
		}
		if err := w.add(at, item.Path, value, w.fileMode(item.Mode), nil); err != nil {
			return err
		}
	}
	return nil
}

// podValue returns the content for a downwardAPI item.
func (m *mounter) podValue(at *field.Path, item corev1.DownwardAPIVolumeFile) (string, error) {
	switch of, resource := item.FieldRef, item.ResourceFieldRef; {
	case of != nil && resource == nil:
		return downward.Field(at.Child("fieldRef"), m.pod, of, map[string]string{
			"metadata.labels":      formatMap(m.pod.Labels),
			"metadata.annotations": formatMap(m.pod.Annotations),
		})
	case of == nil && resource != nil:
		return downward.Resource(at.Child("resourceFieldRef"), m.pod, resource, downward.Machine(m.host.Paths().Root))
	}
	return "", plugins.Invalidf("%s: want one of fieldRef and resourceFieldRef", at)
}

// formatMap formats labels or annotations as a kubelet does: one line <key>="<value>" for each key,
// sorted, without a newline at the end.
func formatMap(m map[string]string) string {
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, key+"="+strconv.Quote(m[key]))
	}
	return strings.Join(lines, "\n")
}

// projectToken adds a token. As in a kubelet, only the common user of all containers and the fsGroup
// can read the token. Without a common user and an fsGroup, the token has the mode of the other files.
func (m *mounter) projectToken(w *writer, at *field.Path, source *corev1.ServiceAccountTokenProjection) error {
	token, _, err := plugins.Token(m.host, m.pod, source.Audience, source.ExpirationSeconds)
	if err != nil {
		return fmt.Errorf("%s: %w", at, err)
	}
	user, mode := podUser(m.pod), w.fileMode(nil)
	if user != nil || w.group != nil {
		mode = tokenMode
	}
	return w.add(at, source.Path, token, mode, user)
}

// podUser returns the common user of all containers of a pod. It returns nil if their users differ, or
// if the image of a container determines its user.
func podUser(pod *corev1.Pod) *int64 {
	var all *int64
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		user := containerUser(pod, c.SecurityContext)
		if user == nil || all != nil && *all != *user {
			return nil
		}
		all = user
	}
	return all
}

// containerUser returns the user of a container; nil if its image determines the user.
func containerUser(pod *corev1.Pod, container *corev1.SecurityContext) *int64 {
	switch {
	case container != nil && container.RunAsUser != nil:
		return container.RunAsUser
	case pod.Spec.SecurityContext != nil:
		return pod.Spec.SecurityContext.RunAsUser
	}
	return nil
}
