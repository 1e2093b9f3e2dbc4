package csi

import (
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Parameters with this prefix are for the orchestrator. The driver does not get them
// (https://kubernetes-csi.github.io/docs/secrets-and-credentials-storage-class.html).
const (
	reserved    = "csi.storage.k8s.io/"
	fsTypeParam = reserved + "fstype"
)

// The kinds of Secrets to which the parameters can refer, by the call that needs the Secret.
const (
	provisionerSecret       = "provisioner"
	controllerPublishSecret = "controller-publish"
	nodeStageSecret         = "node-stage"
	nodePublishSecret       = "node-publish"
	controllerExpandSecret  = "controller-expand"
	nodeExpandSecret        = "node-expand"
)

// secretKinds are the kinds of Secrets above.
var secretKinds = []string{provisionerSecret, controllerPublishSecret, nodeStageSecret, nodePublishSecret, controllerExpandSecret, nodeExpandSecret}

// parameters holds the parameters of a StorageClass.
type parameters struct {
	// driver holds the parameters that the driver gets.
	driver map[string]string
	fsType string
	// secrets holds the reference of each kind; nil if there is none.
	secrets map[string]*corev1.SecretReference
}

// newParameters returns the parameters of a StorageClass. The driver also gets the parameters that
// external-provisioner adds with --extra-create-metadata.
func newParameters(o plugins.ProvisionOptions) (*parameters, error) {
	p := &parameters{secrets: map[string]*corev1.SecretReference{}, driver: map[string]string{
		reserved + "pv/name":       o.PVName,
		reserved + "pvc/name":      o.Claim.Name,
		reserved + "pvc/namespace": o.Claim.Namespace,
	}}
	orchestrator := map[string]string{}
	for key, value := range o.Class.Parameters {
		switch {
		case key == fsTypeParam || strings.EqualFold(key, "fstype"):
			if p.fsType != "" && p.fsType != value {
				return nil, plugins.Invalidf("StorageClass %s: parameters: fsType is given twice, as %s and %s: keep one", o.Class.Name, p.fsType, value)
			}
			p.fsType = value
			if key != fsTypeParam {
				p.driver[key] = value
			}
		case strings.HasPrefix(key, reserved):
			orchestrator[strings.TrimPrefix(key, reserved)] = value
		default:
			p.driver[key] = value
		}
	}
	for _, kind := range secretKinds {
		ref, err := secretReference(kind, orchestrator, o)
		if err != nil {
			return nil, err
		}
		p.secrets[kind] = ref
	}
	for key := range orchestrator { // the known parameters were removed
		return nil, plugins.Invalidf("StorageClass %s: parameter %s%s is unknown: remove it", o.Class.Name, reserved, key)
	}
	return p, nil
}

// secretReference removes the reference of a kind from the parameters and returns it; nil if there
// is none.
func secretReference(kind string, from map[string]string, o plugins.ProvisionOptions) (*corev1.SecretReference, error) {
	nameKey, namespaceKey := kind+"-secret-name", kind+"-secret-namespace"
	name, hasName := from[nameKey]
	namespace, hasNamespace := from[namespaceKey]
	delete(from, nameKey)
	delete(from, namespaceKey)
	if !hasName && !hasNamespace {
		return nil, nil
	}
	if name == "" || namespace == "" {
		return nil, plugins.Invalidf("StorageClass %s: parameters %s%s and …-namespace: set both or neither", o.Class.Name, reserved, nameKey)
	}
	// As in external-provisioner, the namespace cannot depend on the claim's name.
	values := map[string]string{"pv.name": o.PVName, "pvc.namespace": o.Claim.Namespace}
	expandedNamespace, err := expandTemplate(namespace, values, o)
	if err != nil {
		return nil, err
	}
	values["pvc.name"] = o.Claim.Name
	// The name of the provisioner's Secret must not depend on annotations, because the Secret is also
	// needed after the claim is deleted, and the author of a claim must not choose it.
	if kind != provisionerSecret {
		for key, value := range o.Claim.Annotations {
			values["pvc.annotations['"+key+"']"] = value
		}
	}
	expandedName, err := expandTemplate(name, values, o)
	if err != nil {
		return nil, err
	}
	return &corev1.SecretReference{Namespace: expandedNamespace, Name: expandedName}, nil
}

// expandTemplate replaces each ${…} in a template by its value.
func expandTemplate(template string, values map[string]string, o plugins.ProvisionOptions) (string, error) {
	var unknown string
	s := os.Expand(template, func(key string) string {
		value, ok := values[key]
		if !ok {
			unknown = key
		}
		return value
	})
	if unknown != "" {
		return "", plugins.Invalidf("StorageClass %s: parameters: the variable ${%s} in %q is unknown, or the claim lacks this annotation: correct it", o.Class.Name, unknown, template)
	}
	return s, nil
}
