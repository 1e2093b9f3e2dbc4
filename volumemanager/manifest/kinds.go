// Package manifest reads a directory of Kubernetes manifests and watches it for changes.
package manifest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Objects are the objects of a directory's manifests, as an API server would return them: with
// defaults and UIDs, and without the status of pods, claims and volumes. They are shared and must not
// be modified.
type Objects struct {
	// Complete is set when every file was read successfully at least once, and every object that
	// existed at the start was valid at least once. Until then a missing object does not count as
	// removed, so nothing must be unmounted or deleted. If a file or an object becomes invalid later,
	// its last valid version applies.
	Complete bool

	Pods             map[types.NamespacedName]*corev1.Pod
	Claims           map[types.NamespacedName]*corev1.PersistentVolumeClaim
	Volumes          map[string]*corev1.PersistentVolume
	Classes          map[string]*storagev1.StorageClass
	ConfigMaps       map[types.NamespacedName]*corev1.ConfigMap
	Secrets          map[types.NamespacedName]*corev1.Secret
	Drivers          map[string]*storagev1.CSIDriver
	Snapshots        map[types.NamespacedName]*snapshotv1.VolumeSnapshot
	SnapshotContents map[string]*snapshotv1.VolumeSnapshotContent

	Problems []Problem
}

// Problem says what is wrong with a manifest and what to do.
type Problem struct {
	// File is the path of the manifest or of the directory.
	File string `json:"file"`
	// Object is kind, namespace and name, as far as they are known.
	Object  string `json:"object,omitempty"`
	Message string `json:"message"`
}

// key identifies an object.
type key struct{ kind, namespace, name string }

func (k key) String() string {
	if k.namespace == "" {
		return strings.TrimSpace(k.kind + " " + k.name)
	}
	return k.kind + " " + k.namespace + "/" + k.name
}

// kind describes a supported kind.
type kind struct {
	apiVersion string
	namespaced bool
	empty      func() metav1.Object
	// complete sets the defaults of an API server, and returns the errors for which an API server
	// would reject the object.
	complete func(metav1.Object) field.ErrorList
	// put adds an object to the map of its kind.
	put func(*Objects, metav1.Object)
}

const (
	namespaced  = true
	clusterWide = false
)

// kinds are the supported kinds. Another apiVersion of one of them is an error.
var kinds = map[string]kind{
	"Pod":                   newKind("v1", namespaced, completePod, func(to *Objects, o *corev1.Pod) { set(&to.Pods, nameOf(o), o) }),
	"PersistentVolumeClaim": newKind("v1", namespaced, completeClaim, func(to *Objects, o *claim) { set(&to.Claims, nameOf(o), o) }),
	"PersistentVolume":      newKind("v1", clusterWide, completeVolume, func(to *Objects, o *corev1.PersistentVolume) { set(&to.Volumes, o.Name, o) }),
	"ConfigMap":             newKind("v1", namespaced, completeConfigMap, func(to *Objects, o *corev1.ConfigMap) { set(&to.ConfigMaps, nameOf(o), o) }),
	"Secret":                newKind("v1", namespaced, completeSecret, func(to *Objects, o *corev1.Secret) { set(&to.Secrets, nameOf(o), o) }),
	"StorageClass":          newKind("storage.k8s.io/v1", clusterWide, completeClass, func(to *Objects, o *class) { set(&to.Classes, o.Name, o) }),
	"CSIDriver":             newKind("storage.k8s.io/v1", clusterWide, completeDriver, func(to *Objects, o *driver) { set(&to.Drivers, o.Name, o) }),
	"VolumeSnapshot":        newKind("snapshot.storage.k8s.io/v1", namespaced, completeSnapshot, func(to *Objects, o *snapshot) { set(&to.Snapshots, nameOf(o), o) }),
	"VolumeSnapshotContent": newKind("snapshot.storage.k8s.io/v1", clusterWide, completeContent, func(to *Objects, o *content) { set(&to.SnapshotContents, o.Name, o) }),
}

// newKind returns a kind whose objects have the type P, a pointer to T.
func newKind[T any, P interface {
	*T
	metav1.Object
}](apiVersion string, namespaced bool, complete func(P) field.ErrorList, put func(*Objects, P),
) kind {
	return kind{
		apiVersion: apiVersion,
		namespaced: namespaced,
		empty:      func() metav1.Object { return P(new(T)) },
		complete:   func(o metav1.Object) field.ErrorList { return complete(o.(P)) },
		put:        func(to *Objects, o metav1.Object) { put(to, o.(P)) },
	}
}

// groups contains all kinds in the API groups of the supported kinds.
var groups = func() *runtime.Scheme {
	s := runtime.NewScheme()
	utilruntime.Must(errors.Join(corev1.AddToScheme(s), storagev1.AddToScheme(s), snapshotv1.AddToScheme(s)))
	return s
}()

// kindExists reports whether a kind exists in Kubernetes, or may exist because its API group is not in
// groups.
func kindExists(t metav1.TypeMeta) bool {
	kind := t.GroupVersionKind().GroupKind()
	return !groups.IsGroupRegistered(kind.Group) ||
		groups.Recognizes(kind.WithVersion("v1")) && !strings.HasSuffix(kind.Kind, "List")
}

// namespace returns the namespace of an object: inManifest, or the default one if inManifest is
// empty. It returns "" for a cluster-wide kind.
func (k kind) namespace(inManifest string) string {
	if k.namespaced && inManifest == "" {
		return metav1.NamespaceDefault
	}
	if !k.namespaced {
		return ""
	}
	return inManifest
}

func nameOf(o metav1.Object) types.NamespacedName {
	return types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// set adds an object to a map of Objects.
func set[K comparable, T any](all *map[K]*T, k K, o *T) {
	if *all == nil {
		*all = map[K]*T{}
	}
	(*all)[k] = o
}

// kindNames lists the supported kinds for messages.
func kindNames() string {
	return strings.Join(slices.Sorted(maps.Keys(kinds)), ", ") + " and List"
}

// uidPattern is stricter than Kubernetes, which accepts any UID: UIDs become names of directories and
// of provisioned volumes.
var uidPattern = regexp.MustCompile(`^[A-Za-z0-9-]{1,63}$`)

// completeMeta checks the metadata of any kind. It sets a missing namespace to default, and derives a
// missing UID from the name.
func completeMeta(kindName string, k kind, o metav1.Object) (errs field.ErrorList) {
	meta := field.NewPath("metadata")
	errs = append(errs, checkSubdomain(meta.Child("name"), o.GetName())...)
	if !k.namespaced && o.GetNamespace() != "" {
		errs = append(errs, field.Forbidden(meta.Child("namespace"), "a "+kindName+" has no namespace: remove this field"))
	}
	o.SetNamespace(k.namespace(o.GetNamespace()))
	if k.namespaced {
		errs = append(errs, validate(meta.Child("namespace"), o.GetNamespace(), validation.IsDNS1123Label)...)
	}
	switch uid := o.GetUID(); {
	case uid == "":
		o.SetUID(uidOf(key{kindName, o.GetNamespace(), o.GetName()}))
	case !uidPattern.MatchString(string(uid)):
		errs = append(errs, field.Invalid(meta.Child("uid"), uid, "must be 1 to 63 letters, digits and dashes, or absent"))
	}
	return errs
}

// uidOf derives a UID from a key: a UUID of version 8 (RFC 9562 §5.8).
func uidOf(k key) types.UID {
	sum := sha256.Sum256([]byte(k.kind + "/" + k.namespace + "/" + k.name))
	sum[6] = sum[6]&0x0f | 0x80
	sum[8] = sum[8]&0x3f | 0x80
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16]))
}

// validate converts the messages of check, a function of package validation, to errors.
func validate(path *field.Path, value string, check func(string) []string) (errs field.ErrorList) {
	for _, message := range check(value) {
		errs = append(errs, field.Invalid(path, value, message))
	}
	return errs
}

// checkSubdomain checks that a name is a DNS subdomain (RFC 1123), as the names of objects must be.
func checkSubdomain(path *field.Path, name string) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(path, "")}
	}
	return validate(path, name, validation.IsDNS1123Subdomain)
}
