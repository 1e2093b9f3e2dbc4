package plugins

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Strings returns the data of a Secret, or the binary data of a ConfigMap, as strings.
func Strings(data map[string][]byte) map[string]string {
	all := make(map[string]string, len(data))
	for key, value := range data {
		all[key] = string(value)
	}
	return all
}

// tokenLifetime is the default of a TokenRequest's expirationSeconds.
const tokenLifetime = time.Hour

// Token returns a token of a pod's service account. An empty audience and nil seconds are the
// defaults of the TokenRequest API.
func Token(host Host, pod *corev1.Pod, audience string, seconds *int64) (token string, expires time.Time, err error) {
	var audiences []string
	if audience != "" {
		audiences = []string{audience}
	}
	lifetime := tokenLifetime
	if seconds != nil {
		lifetime = time.Duration(*seconds) * time.Second
	}
	return host.Token(pod, audiences, lifetime)
}

// NewAttachment returns the record of an attached volume. The source must contain the fields that
// Detach needs, because the manifest may be removed before Detach is called.
func NewAttachment(host Host, name, driver string, source corev1.PersistentVolumeSource) *storagev1.VolumeAttachment {
	return &storagev1.VolumeAttachment{
		TypeMeta:   metav1.TypeMeta{APIVersion: storagev1.SchemeGroupVersion.String(), Kind: "VolumeAttachment"},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: storagev1.VolumeAttachmentSpec{
			Attacher: driver,
			NodeName: host.NodeName(),
			Source:   storagev1.VolumeAttachmentSource{InlineVolumeSpec: &corev1.PersistentVolumeSpec{PersistentVolumeSource: source}},
		},
	}
}
