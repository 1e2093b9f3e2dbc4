{{/* RBAC rules, by the pods and programs that need them. */}}

{{/* For the driver on a node and for `trivet doctor`: the CSIDriver object, the drivers that the kubelet has
registered, the StorageClasses, and the node. */}}
{{- define "trivet.nodeClusterRules" -}}
- apiGroups: [storage.k8s.io]
  resources: [csidrivers]
  resourceNames: [{{ toYaml .Values.driverName }}]
  verbs: [get]
- apiGroups: [storage.k8s.io]
  resources: [csinodes]
  verbs: [get]
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [list]
- apiGroups: [""]
  resources: [nodes]
  verbs: [get]
{{- if .Values.config.startupTaint }}
# To remove the startup taint of the driver's own node.
- apiGroups: [""]
  resources: [nodes]
  verbs: [patch]
{{- end }}
{{- end -}}

{{/* The SecurityContextConstraints of OpenShift that allow the pods: dict "root" $ "pod" "node", "controller" or
"protection". With NFS volumes, the controller's driver has capabilities that only privileged allows. */}}
{{- define "trivet.scc" -}}
{{- $nfs := not (empty (include "trivet.nfs" .root)) -}}
{{- ternary "privileged" "nonroot-v2" (or (eq .pod "node") (and (eq .pod "controller") $nfs)) -}}
{{- end -}}

{{/* For the pods on OpenShift: dict as of trivet.scc. */}}
{{- define "trivet.sccRules" -}}
{{- if .root.Values.openshift.enabled }}
# OpenShift: the pods use these SecurityContextConstraints.
- apiGroups: [security.openshift.io]
  resources: [securitycontextconstraints]
  resourceNames: [{{ include "trivet.scc" . }}]
  verbs: [use]
{{- end }}
{{- end -}}

{{/* For `trivet doctor`: its own pod. */}}
{{- define "trivet.nodeRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
{{- end -}}

{{- define "trivet.sidecarClusterRules" -}}
# Provisioner: the topology of each node. Attacher: the ID of the node.
- apiGroups: [storage.k8s.io]
  resources: [csinodes]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Provisioner: creates volumes for claims. Attacher and resizer patch volumes.
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, update]
# Provisioner and resizer: read the limits of a volume's I/O.
- apiGroups: [storage.k8s.io]
  resources: [volumeattributesclasses]
  verbs: [get, list, watch]
# Provisioner: does not delete a volume that is attached.
- apiGroups: [storage.k8s.io]
  resources: [volumeattachments]
  verbs: [get, list, watch]
# Provisioner, resizer{{ if .Values.snapshots.enabled }}, snapshotter{{ end }}: record events for the claim.
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
# Resizer.
- apiGroups: [""]
  resources: [persistentvolumeclaims/status]
  verbs: [patch]
{{- if .Values.attachRequired }}
# Attacher.
- apiGroups: [storage.k8s.io]
  resources: [volumeattachments]
  verbs: [patch]
- apiGroups: [storage.k8s.io]
  resources: [volumeattachments/status]
  verbs: [patch]
{{- end }}
{{- if .Values.snapshots.enabled }}
# Provisioner: creates volumes from snapshots, and protects the snapshot meanwhile.
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshots]
  verbs: [get, list, watch, update]
# Snapshotter; the provisioner reads these objects.
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshotcontents]
  verbs: [get, list, watch, update, patch]
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshotcontents/status]
  verbs: [update, patch]
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshotclasses]
  verbs: [get, list, watch]
{{- end }}
{{- if .Values.snapshots.groups }}
# Snapshotter.
- apiGroups: [groupsnapshot.storage.k8s.io]
  resources: [volumegroupsnapshotcontents]
  verbs: [get, list, watch, update, patch]
- apiGroups: [groupsnapshot.storage.k8s.io]
  resources: [volumegroupsnapshotcontents/status]
  verbs: [update, patch]
- apiGroups: [groupsnapshot.storage.k8s.io]
  resources: [volumegroupsnapshotclasses]
  verbs: [get, list, watch]
{{- end }}
{{- if .Values.snapshots.metadata.enabled }}
# Snapshot-metadata: reads the audience of tokens, the identity of a client, and whether the client may
# read the snapshot.
- apiGroups: [cbt.storage.k8s.io]
  resources: [snapshotmetadataservices]
  resourceNames: [{{ toYaml .Values.driverName }}]
  verbs: [get]
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- end -}}

{{- define "trivet.sidecarRules" -}}
{{- if .Values.storageCapacity.enabled }}
# Provisioner: publishes the free capacity for the scheduler.
- apiGroups: [storage.k8s.io]
  resources: [csistoragecapacities]
  verbs: [get, list, watch, create, update, patch, delete]
# Provisioner: finds the owner of the capacity objects, starting at its own pod.
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
{{- if ne .Values.shape "oneNode" }}
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [get]
{{- end }}
{{- end }}
{{- if ne .Values.shape "oneNode" }}
# The lease of the active replica.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end }}
{{- end -}}

{{/* Certificates: a node requests a certificate, and the controller has the CA. With resourceNames,
Kubernetes allows list and watch only in requests that select the name. */}}
{{- define "trivet.enrolClusterRules" -}}
# Requests a certificate for this node.
- apiGroups: [certificates.k8s.io]
  resources: [certificatesigningrequests]
  verbs: [list, watch, create]
{{- end -}}

{{- define "trivet.enrolRules" -}}
# The CA that the driver trusts.
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ include "trivet.authority" . }}]
  verbs: [list, watch]
{{- end -}}

{{- define "trivet.authorityClusterRules" -}}
# For `trivet doctor`.
- apiGroups: [storage.k8s.io]
  resources: [csidrivers]
  resourceNames: [{{ toYaml .Values.driverName }}]
  verbs: [get]
# Driver: the list of nodes.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Driver: signs the certificates of the nodes, and no others, because the signer is that of this driver.
- apiGroups: [certificates.k8s.io]
  resources: [certificatesigningrequests]
  verbs: [list, watch]
- apiGroups: [certificates.k8s.io]
  resources: [certificatesigningrequests/approval, certificatesigningrequests/status]
  verbs: [patch]
- apiGroups: [certificates.k8s.io]
  resources: [signers]
  resourceNames: [{{ .Values.driverName }}/node]
  verbs: [approve, sign]
{{- end -}}

{{/* For events on claims and their pods. */}}
{{- define "trivet.eventClusterRules" -}}
# Driver: creates events on claims in all namespaces, and repeats them. Their state is only in the API.
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [list]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- if .Values.controller.podEvents }}
# Driver: finds the pods that use a claim.
- apiGroups: [""]
  resources: [pods]
  verbs: [list]
{{- end }}
{{- end -}}

{{/* For the release of the claims of lost nodes. */}}
{{- define "trivet.nodeLossClusterRules" -}}
{{- if .Values.controller.nodeLoss.enabled }}
# Driver: reads the volumes of lost nodes and their claims, and deletes both.
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, delete]
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [get, list]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
{{- end -}}

{{/* For the protection of the claims of classes with the parameter protect. */}}
{{- define "trivet.protectClusterRules" -}}
{{- if .Values.protection.enabled }}
# Driver: finds the claims and their classes, and the nodes of their copies.
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [get, list, watch]
- apiGroups: [storage.k8s.io]
  resources: [csinodes]
  verbs: [get]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [get]
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshotclasses]
  verbs: [list]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# Driver: gives the jobs their rights in the namespace of a claim, as `kubectl trivet protect`. A rule for create cannot have
# resourceNames.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [create]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  resourceNames: ["{{ .Release.Namespace }}:{{ include "trivet.protection" . }}"]
  verbs: [get, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  resourceNames: ["{{ .Release.Namespace }}:{{ include "trivet.protection" . }}"]
  verbs: [bind]
{{- end }}
{{- end -}}

{{- define "trivet.protectRules" -}}
{{- if .Values.protection.enabled }}
# Driver: the CronJobs that make copies, their jobs and ServiceAccount, and the image of its own pod.
- apiGroups: [batch]
  resources: [cronjobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [list, delete]
- apiGroups: [""]
  resources: [serviceaccounts, pods]
  verbs: [list]
{{- end }}
{{- end -}}

{{- define "trivet.authorityRules" -}}
# Driver: verifies the pod that requests a certificate.
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
# Driver: the addresses of the nodes' drivers.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Driver: the certificate and the key of the CA, and the record of the node of each pool. A rule for
# create cannot have resourceNames.
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ include "trivet.authority" . }}, {{ include "trivet.poolOwners" . }}]
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "trivet.authority" . }}]
  {{- if .Values.certificates.certManager.enabled }}
  verbs: [list, watch]
  {{- else }}
  verbs: [list, watch, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
  {{- end }}
{{- end -}}

{{/* A ServiceAccount with a ClusterRole and a Role: dict "root" $ "name" the name of the roles "account"
the name of the ServiceAccount "annotations" its annotations "cluster" the rules of the ClusterRole, as
text "namespace" the rules of the Role, as text. */}}
{{- define "trivet.account" -}}
{{- $clusterName := printf "%s:%s" .root.Release.Namespace .name -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ toYaml .account }}
  namespace: {{ toYaml .root.Release.Namespace }}
  labels: {{- include "trivet.labels" .root | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
---
# The name contains the namespace, because another namespace may have a release of the same name.
# Neither of the two names can contain a colon.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $clusterName }}
  labels: {{- include "trivet.labels" .root | nindent 4 }}
rules:
  {{- .cluster | trim | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $clusterName }}
  labels: {{- include "trivet.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ $clusterName }}
subjects:
  - kind: ServiceAccount
    name: {{ toYaml .account }}
    namespace: {{ toYaml .root.Release.Namespace }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .name }}
  namespace: {{ toYaml .root.Release.Namespace }}
  labels: {{- include "trivet.labels" .root | nindent 4 }}
rules:
  {{- .namespace | trim | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .name }}
  namespace: {{ toYaml .root.Release.Namespace }}
  labels: {{- include "trivet.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ toYaml .account }}
    namespace: {{ toYaml .root.Release.Namespace }}
{{- end -}}


{{/* "true" if the driver may patch nodes and the cluster has the API for a policy that limits this,
otherwise empty. */}}
{{- define "trivet.nodePolicy" -}}
{{- if .Values.config.startupTaint -}}
{{- include "trivet.policies" . -}}
{{- end -}}
{{- end -}}

{{/* "true" if the cluster has the API for admission policies, otherwise empty. Helm knows the kinds of a
cluster; `helm template` knows only the API groups, so it
assumes that the API exists. */}}
{{- define "trivet.policies" -}}
{{- $kinds := .Capabilities.APIVersions.Has "v1/Pod" -}}
{{- if or (not $kinds) (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy") -}}
true
{{- end -}}
{{- end -}}
