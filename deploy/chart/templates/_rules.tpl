{{/* Rights, by who needs them. */}}

{{/* The driver on a node, and `trivet doctor`: what the kubelet registered, who owns the
CSIDriver, which classes there are. */}}
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
# Its own node's startup taint.
- apiGroups: [""]
  resources: [nodes]
  verbs: [patch]
{{- end }}
{{- end -}}

{{/* The own pod (`trivet doctor`). */}}
{{- define "trivet.nodeRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
{{- end -}}

{{- define "trivet.sidecarClusterRules" -}}
# Provisioner: which nodes have which topology. Attacher: the node's ID.
- apiGroups: [storage.k8s.io]
  resources: [csinodes]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Provisioner: volumes for claims. Attacher and resizer patch volumes too.
- apiGroups: [storage.k8s.io]
  resources: [storageclasses]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [persistentvolumes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, update]
# Provisioner: no volume is deleted while it is attached.
- apiGroups: [storage.k8s.io]
  resources: [volumeattachments]
  verbs: [get, list, watch]
# Provisioner, resizer{{ if .Values.snapshots.enabled }}, snapshotter{{ end }}: say what happened on the claim.
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
# Provisioner: volumes from snapshots, which it protects meanwhile.
- apiGroups: [snapshot.storage.k8s.io]
  resources: [volumesnapshots]
  verbs: [get, list, watch, update]
# Snapshotter, and to read also the provisioner.
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
# Snapshot-metadata: the audience of tokens, the identity of a client, and its access to the snapshot.
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
# Provisioner: how much room there is, for the scheduler.
- apiGroups: [storage.k8s.io]
  resources: [csistoragecapacities]
  verbs: [get, list, watch, create, update, patch, delete]
# Provisioner: from the own pod to the owner of those.
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
# Which of several works.
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get, create, update]
{{- end }}
{{- end -}}

{{/* Certificates: a node requests a certificate, the controller has the CA. Kubernetes allows a list or
watch of one named object only if the request selects that name. */}}
{{- define "trivet.enrolClusterRules" -}}
# A certificate for this node.
- apiGroups: [certificates.k8s.io]
  resources: [certificatesigningrequests]
  verbs: [list, watch, create]
{{- end -}}

{{- define "trivet.enrolRules" -}}
# Whom to trust.
- apiGroups: [""]
  resources: [configmaps]
  resourceNames: [{{ include "trivet.authority" . }}]
  verbs: [list, watch]
{{- end -}}

{{- define "trivet.authorityClusterRules" -}}
# `trivet doctor`.
- apiGroups: [storage.k8s.io]
  resources: [csidrivers]
  resourceNames: [{{ toYaml .Values.driverName }}]
  verbs: [get]
# Driver: which nodes there are.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Driver: the nodes' certificates, and no others: the signer is its own.
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

{{- define "trivet.authorityRules" -}}
# Driver: the pod that requests a certificate.
- apiGroups: [""]
  resources: [pods]
  verbs: [get]
# Driver: where the nodes' drivers are.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
# Driver: whom to trust, the CA, and which node has which pool. A right to create has no
# names.
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

{{/* A ServiceAccount with a ClusterRole and a Role: dict "root" $ "name" what they are
called "account" the ServiceAccount's name "annotations" its annotations "cluster" and
"namespace" the rules, as text. */}}
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
# Another namespace may have a release of the same name. Neither half can hold a colon.
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


{{/* "true" if the permission to patch nodes exists and a policy can limit it, else empty. Helm has the
kinds of a cluster; `helm template` has only the groups. */}}
{{- define "trivet.nodePolicy" -}}
{{- $kinds := .Capabilities.APIVersions.Has "v1/Pod" -}}
{{- if and .Values.config.startupTaint (or (not $kinds) (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy")) -}}
true
{{- end -}}
{{- end -}}
