package csi

import (
	"cmp"
	"encoding/json"
	"strconv"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// tokensKey is the key of the tokens that a CSIDriver object requests.
const tokensKey = "csi.storage.k8s.io/serviceAccount.tokens"

// podInfo returns the attributes of a pod; nil unless the CSIDriver object sets podInfoOnMount.
func podInfo(object storagev1.CSIDriverSpec, pod *corev1.Pod, ephemeral bool) map[string]string {
	if object.PodInfoOnMount == nil || !*object.PodInfoOnMount {
		return nil
	}
	return map[string]string{
		"csi.storage.k8s.io/pod.name":            pod.Name,
		"csi.storage.k8s.io/pod.namespace":       pod.Namespace,
		"csi.storage.k8s.io/pod.uid":             string(pod.UID),
		"csi.storage.k8s.io/serviceAccount.name": cmp.Or(pod.Spec.ServiceAccountName, "default"), // the default of the API server's admission
		"csi.storage.k8s.io/ephemeral":           strconv.FormatBool(ephemeral),
	}
}

// tokens returns the tokens that the CSIDriver object requests, by audience; nil if it requests
// none.
func (p *Plugin) tokens(object storagev1.CSIDriverSpec, pod *corev1.Pod) (map[string]string, error) {
	if len(object.TokenRequests) == 0 {
		return nil, nil
	}
	all := map[string]authenticationv1.TokenRequestStatus{}
	for _, r := range object.TokenRequests {
		token, expires, err := plugins.Token(p.host, pod, r.Audience, r.ExpirationSeconds)
		if err != nil {
			return nil, err
		}
		all[r.Audience] = authenticationv1.TokenRequestStatus{Token: token, ExpirationTimestamp: metav1.NewTime(expires)}
	}
	b, err := json.Marshal(all)
	return map[string]string{tokensKey: string(b)}, err
}
