package flexvolume

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Options that a kubelet adds to those of the volume.
const (
	optionFSType         = "kubernetes.io/fsType"
	optionReadWrite      = "kubernetes.io/readwrite"
	optionName           = "kubernetes.io/pvOrVolumeName"
	optionFSGroup        = "kubernetes.io/mounterArgs.FsGroup"
	optionSecret         = "kubernetes.io/secret/" // followed by the key
	optionPodName        = "kubernetes.io/pod.name"
	optionPodNamespace   = "kubernetes.io/pod.namespace"
	optionPodUID         = "kubernetes.io/pod.uid"
	optionServiceAccount = "kubernetes.io/serviceAccount.name"
)

// sourceOf returns the flexVolume of a spec, converted to that of a PersistentVolume; nil if there is
// none.
func sourceOf(spec *plugins.Spec) *corev1.FlexPersistentVolumeSource {
	if spec.PersistentVolume != nil {
		return spec.PersistentVolume.Spec.FlexVolume
	}
	if spec.Volume == nil || spec.Volume.FlexVolume == nil {
		return nil
	}
	v := spec.Volume.FlexVolume
	s := &corev1.FlexPersistentVolumeSource{Driver: v.Driver, FSType: v.FSType, ReadOnly: v.ReadOnly, Options: v.Options}
	if v.SecretRef != nil {
		s.SecretRef = &corev1.SecretReference{Name: v.SecretRef.Name}
	}
	return s
}

// maxVolume is the maximum length of a volume's name in bytes: NAME_MAX (linux/limits.h) minus the
// suffixes of the record and its temporary file.
const maxVolume = 255 - len(recordSuffix) - len(atomicfile.Temporary)

// check validates a spec.
func check(spec *plugins.Spec) error {
	s := sourceOf(spec)
	if err := checkDriver(s.Driver); err != nil {
		return err
	}
	if err := plugins.CheckPart("the volume's name", spec.Name()); err != nil {
		return err
	}
	if n := len(spec.Name()); n > maxVolume {
		return plugins.Invalidf("the volume's name %q has %d bytes, and the maximum with a flexVolume is %d: shorten the name", spec.Name(), n, maxVolume)
	}
	if spec.Block() {
		return plugins.Invalidf("volumeMode Block: volume %s has a flexVolume, which has no raw devices: use Filesystem", spec.Name())
	}
	for key := range s.Options {
		host, _, _ := strings.Cut(strings.ToLower(key), "/")
		if strings.HasSuffix(host, "kubernetes.io") || strings.HasSuffix(host, "k8s.io") {
			return plugins.Invalidf("flexVolume.options %q: manifests cannot set options of kubernetes.io: remove the option", key)
		}
	}
	return nil
}

func readOnly(spec *plugins.Spec) bool { return spec.ReadOnly || sourceOf(spec).ReadOnly }

// mountOptions returns the options of mounts that the plugin creates instead of the driver.
func mountOptions(spec *plugins.Spec) (o mount.Options) {
	if readOnly(spec) {
		return o.ReadOnly()
	}
	return o
}

// options returns the options of a spec and the extra options as JSON, as a kubelet passes them.
func options(spec *plugins.Spec, extra map[string]string) string {
	s := sourceOf(spec)
	all := map[string]string{optionFSType: s.FSType, optionReadWrite: "rw", optionName: spec.Name()}
	if readOnly(spec) {
		all[optionReadWrite] = "ro"
	}
	maps.Copy(all, extra)
	maps.Copy(all, s.Options)
	b, _ := json.Marshal(all) //nolint:errchkjson // strings
	return string(b)
}

// podOptions returns the additional options of the call mount, and the secret values in them.
func (d *driver) podOptions(spec *plugins.Spec, pod *corev1.Pod, args plugins.MounterArgs) (extra map[string]string, hidden secrets, err error) {
	extra = map[string]string{
		optionPodName: pod.Name, optionPodNamespace: pod.Namespace, optionPodUID: string(pod.UID),
		optionServiceAccount: pod.Spec.ServiceAccountName,
	}
	if args.FSGroup != nil {
		extra[optionFSGroup] = strconv.FormatInt(*args.FSGroup, 10)
	}
	ref := sourceOf(spec).SecretRef
	if ref == nil {
		return extra, nil, nil
	}
	values, err := d.secret(ref, pod.Namespace)
	if err != nil {
		return nil, nil, err
	}
	for key, value := range values {
		encoded := base64.StdEncoding.EncodeToString(value)
		extra[optionSecret+key] = encoded
		hidden = append(hidden, encoded, string(value))
	}
	return extra, hidden, nil
}

// secret returns the values of a Secret. Like a kubelet, it requires that the Secret's type is the
// driver's name, so that a volume cannot make a driver expose other secrets.
func (d *driver) secret(ref *corev1.SecretReference, namespace string) (map[string][]byte, error) {
	if ref.Namespace != "" {
		namespace = ref.Namespace
	}
	s, err := d.host.Secret(namespace, ref.Name)
	if err != nil {
		return nil, fmt.Errorf("flexVolume.secretRef: secret %s/%s: %w: add the Secret", namespace, ref.Name, err)
	}
	if string(s.Type) != d.name {
		return nil, plugins.Invalidf("flexVolume.secretRef: secret %s/%s has type %q: set it to %s, which permits the driver to use it", namespace, ref.Name, s.Type, d.name)
	}
	return s.Data, nil
}

// sumLength is the length of the hash in the VolumeName of an inline volume, in characters.
const sumLength = 16

// VolumeName returns the name of the PersistentVolume, as in a kubelet. For an inline volume it adds
// a hash of the source, to distinguish the volume from volumes of other pods.
func (d *driver) VolumeName(spec *plugins.Spec) (string, error) {
	if err := check(spec); err != nil {
		return "", err
	}
	if spec.PersistentVolume != nil {
		return spec.Name(), nil
	}
	b, err := json.Marshal(sourceOf(spec))
	sum := sha256.Sum256(b)
	return spec.Name() + "-" + hex.EncodeToString(sum[:])[:sumLength], err
}
