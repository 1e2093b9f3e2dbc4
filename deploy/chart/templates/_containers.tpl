{{/* The containers, one template each, so that a workload is a list of them. Every
one takes the chart's root context. */}}

{{/* Sidecars run as root, since the driver's socket is root's alone, and may do
nothing that root could. */}}
{{- define "trivet.sidecarSecurity" -}}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  runAsUser: 0
  privileged: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
  {{- with .Values.sidecars.seLinuxOptions }}
  seLinuxOptions: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The token of the pod's ServiceAccount, for the containers that talk to the API
server and no others. */}}
{{- define "trivet.tokenMount" -}}
- name: api-token
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end -}}

{{- define "trivet.tokenVolume" -}}
- name: api-token
  projected:
    defaultMode: 0400
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap:
          name: kube-root-ca.crt
          items: [{key: ca.crt, path: ca.crt}]
      - downwardAPI:
          items:
            - path: namespace
              fieldRef: {fieldPath: metadata.namespace}
{{- end -}}

{{/* A sidecar that works for the cluster: dict "root" $ "name" its key in values
"title" the container's name "args" its own flags "env" its environment. */}}
{{- define "trivet.clusterSidecar" -}}
{{- $s := index .root.Values.sidecars .name -}}
- name: {{ .title }}
  image: {{ include "trivet.sidecarImage" . }}
  imagePullPolicy: {{ .root.Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --v={{ .root.Values.logLevel }}
    - --timeout={{ $s.timeout }}
    - --kube-api-qps={{ $s.kubeAPIQPS }}
    - --kube-api-burst={{ $s.kubeAPIBurst }}
    - --retry-interval-start={{ $s.retryIntervalStart }}
    - --retry-interval-max={{ $s.retryIntervalMax }}
    {{- range .args }}
    - {{ . }}
    {{- end }}
  {{- with .env }}
  env: {{- . | nindent 4 }}
  {{- end }}
  {{- include "trivet.sidecarSecurity" .root | nindent 2 }}
  resources: {{- toYaml $s.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    {{- include "trivet.tokenMount" .root | nindent 4 }}
{{- end -}}

{{- define "trivet.driverContainer" -}}
- name: trivet
  image: {{ include "trivet.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args:
    - driver
    - --endpoint=unix:///csi/csi.sock
    - --node-id=$(NODE_NAME)
    - --driver-name={{ .Values.driverName }}
    - --config=/etc/trivet/config.yaml
    - --state-dir={{ clean .Values.stateDir }}
    - --http-address=:{{ .Values.ports.metrics }}
    - --v={{ .Values.logLevel }}
  env:
    - name: NODE_NAME
      valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
    - name: POD_NAMESPACE
      valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
    - name: POD_UID
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
    # What `trivet doctor` expects.
    - name: CSI_DRIVER_NAME
      value: {{ toYaml .Values.driverName }}
  terminationMessagePolicy: FallbackToLogsOnError
  # Kubernetes' default is in /dev, which is the node's here: the file would stay there.
  terminationMessagePath: /run/termination-log
  # Mounts reach the node by Bidirectional propagation, which Kubernetes allows to
  # privileged containers only; loop devices and mounts want as much.
  securityContext:
    runAsUser: 0
    privileged: true
    readOnlyRootFilesystem: true
  ports:
    - {name: metrics, containerPort: {{ .Values.ports.metrics }}, protocol: TCP}
    # livenessprobe's, named here for the livenessProbe below.
    - {name: health, containerPort: {{ .Values.ports.health }}, protocol: TCP}
  # The driver's own answer: it is there and can write its state directory. It does
  # not wait for pools, nor for a sidecar whose image is still being pulled.
  startupProbe:
    httpGet: {path: /healthz, port: metrics}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 120
  # livenessprobe calls Probe over the driver's socket: is it served, and can it work at
  # all? While pools are opened, at most 30 seconds after the start, the answer is no,
  # and until livenessprobe's image is pulled there is none: hence two minutes. Where
  # that image cannot be had the driver is restarted time and again.
  livenessProbe:
    httpGet: {path: /healthz, port: health}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 12
  # Are its pools open? A restart would not mend one that is not.
  readinessProbe:
    httpGet: {path: /readyz, port: metrics}
    periodSeconds: 5
    timeoutSeconds: 5
  resources: {{- toYaml .Values.driver.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    - {name: config, mountPath: /etc/trivet, readOnly: true}
    # The same path as on the node: the kubelet's requests name it.
    - {name: kubelet-dir, mountPath: {{ clean .Values.kubeletDir }}, mountPropagation: Bidirectional}
    # Loop devices come and go; the container's own /dev would not show them.
    - {name: dev, mountPath: /dev}
    # Disks that the node mounts below show up here.
    - {name: state-dir, mountPath: {{ clean .Values.stateDir }}, mountPropagation: HostToContainer}
    {{- range $i, $dir := include "trivet.poolMounts" . | fromJsonArray }}
    - {name: pool-{{ $i }}, mountPath: {{ $dir }}, mountPropagation: HostToContainer}
    {{- end }}
    {{- include "trivet.tokenMount" . | nindent 4 }}
{{- end -}}

{{- define "trivet.registrarContainer" -}}
- name: node-driver-registrar
  image: {{ include "trivet.sidecarImage" (dict "root" . "name" "registrar") }}
  imagePullPolicy: {{ .Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --kubelet-registration-path={{ clean .Values.kubeletDir }}/plugins/{{ .Values.driverName }}/csi.sock
    # One second, the default, is short on a node that is just starting.
    - --timeout=10s
    - --http-endpoint=:{{ .Values.ports.registrar }}
    - --v={{ .Values.logLevel }}
  {{- include "trivet.sidecarSecurity" . | nindent 2 }}
  ports:
    - {name: registrar, containerPort: {{ .Values.ports.registrar }}, protocol: TCP}
  # It answers once the driver has said its name, which no restart would hasten.
  startupProbe:
    httpGet: {path: /healthz, port: registrar}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 600
  # Does its socket still answer? Another installation on the node, made by mistake,
  # takes it away when it goes, and the kubelet then forgets the driver; started again,
  # the registrar makes it anew.
  livenessProbe:
    httpGet: {path: /healthz, port: registrar}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  resources: {{- toYaml .Values.sidecars.registrar.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
    - {name: registration-dir, mountPath: /registration}
{{- end -}}

{{- define "trivet.livenessContainer" -}}
- name: liveness-probe
  image: {{ include "trivet.sidecarImage" (dict "root" . "name" "livenessProbe") }}
  imagePullPolicy: {{ .Values.sidecars.pullPolicy }}
  args:
    - --csi-address=/csi/csi.sock
    - --http-endpoint=:{{ .Values.ports.health }}
    # Below the livenessProbe's timeoutSeconds, so that the answer says why.
    - --probe-timeout=4s
    - --v={{ .Values.logLevel }}
  {{- include "trivet.sidecarSecurity" . | nindent 2 }}
  resources: {{- toYaml .Values.sidecars.livenessProbe.resources | nindent 4 }}
  volumeMounts:
    - {name: plugin-dir, mountPath: /csi}
{{- end -}}

{{/* No leader election in the sidecars: there is one pod, a DaemonSet starts the
next one after it ended, and the driver's lock on its pools keeps a second one from
doing harm. An election would add a lease to wait for at each start. */}}
{{- define "trivet.provisionerContainer" -}}
{{- $s := .Values.sidecars.provisioner -}}
{{- $args := list
  (printf "--worker-threads=%d" (int64 $s.workers))
  "--strict-topology=false"
  "--immediate-topology=false"
  "--extra-create-metadata"
  "--default-fstype=ext4" -}}
{{- $env := "" -}}
{{- if .Values.storageCapacity.enabled -}}
{{- $args = concat $args (list
  "--enable-capacity"
  "--capacity-ownerref-level=1"
  (printf "--capacity-poll-interval=%s" .Values.storageCapacity.pollInterval)
  (printf "--capacity-threads=%d" (int64 $s.capacityWorkers))
  (printf "--kube-api-capacity-qps=%v" $s.capacityQPS)
  (printf "--kube-api-capacity-burst=%d" (int64 $s.capacityBurst))) -}}
{{- $env = include "trivet.ownerEnv" . -}}
{{- end -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "provisioner" "title" "csi-provisioner" "args" $args "env" $env) -}}
{{- end -}}

{{/* Whose pod this is: the DaemonSet, one level up, owns the capacity objects. */}}
{{- define "trivet.ownerEnv" -}}
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{- define "trivet.attacherContainer" -}}
{{- $args := list (printf "--worker-threads=%d" (int64 .Values.sidecars.attacher.workers)) -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "attacher" "title" "csi-attacher" "args" $args) -}}
{{- end -}}

{{/* Volumes grow while in use: without its own idea of who uses them the resizer
need not watch every pod of the cluster. */}}
{{- define "trivet.resizerContainer" -}}
{{- $args := list (printf "--workers=%d" (int64 .Values.sidecars.resizer.workers)) "--handle-volume-inuse-error=false" -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "resizer" "title" "csi-resizer" "args" $args) -}}
{{- end -}}

{{- define "trivet.snapshotterContainer" -}}
{{- $args := list (printf "--worker-threads=%d" (int64 .Values.sidecars.snapshotter.workers)) "--extra-create-metadata" -}}
{{- include "trivet.clusterSidecar" (dict "root" . "name" "snapshotter" "title" "csi-snapshotter" "args" $args) -}}
{{- end -}}

{{/* Containers of the Controller service's half, and of the Node service's. */}}
{{- define "trivet.controllerSidecars" -}}
{{ include "trivet.provisionerContainer" . }}
{{- if .Values.attachRequired }}
{{ include "trivet.attacherContainer" . }}
{{- end }}
{{ include "trivet.resizerContainer" . }}
{{- if .Values.snapshots.enabled }}
{{ include "trivet.snapshotterContainer" . }}
{{- end }}
{{- end -}}

{{- define "trivet.nodeSidecars" -}}
{{ include "trivet.registrarContainer" . }}
{{ include "trivet.livenessContainer" . }}
{{- end -}}

{{/* Host paths of the driver's container. */}}
{{- define "trivet.driverVolumes" -}}
- name: plugin-dir
  hostPath: {path: {{ clean .Values.kubeletDir }}/plugins/{{ .Values.driverName }}, type: DirectoryOrCreate}
# Directory, not DirectoryOrCreate: a wrong path has to be said.
- name: kubelet-dir
  hostPath: {path: {{ clean .Values.kubeletDir }}, type: Directory}
- name: dev
  hostPath: {path: /dev, type: Directory}
- name: state-dir
  hostPath: {path: {{ clean .Values.stateDir }}, type: DirectoryOrCreate}
{{- range $i, $dir := include "trivet.poolMounts" . | fromJsonArray }}
- name: pool-{{ $i }}
  hostPath: {path: {{ $dir }}, type: DirectoryOrCreate}
{{- end }}
- name: config
  configMap: {name: {{ include "trivet.fullname" . }}-config, defaultMode: 0444}
{{ include "trivet.tokenVolume" . }}
{{- end -}}
