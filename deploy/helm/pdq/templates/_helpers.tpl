{{- define "pdq.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-pdq" .Release.Name) (contains "pdq" .Release.Name) -}}
{{- $name | replace "." "-" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels that never change: selectors are made of them. Arguments: root, component. */}}
{{- define "pdq.selector" -}}
app.kubernetes.io/name: pdq
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "pdq.labels" -}}
{{ include "pdq.selector" . }}
app.kubernetes.io/part-of: pdq
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* Arguments: root, name (pdq-<name> is the image). */}}
{{- define "pdq.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ . }}/{{ end -}}
pdq-{{ .name }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* Where a server is. Empty: a Secret says so. Arguments: root, url, bundled (its URL, or empty), what. */}}
{{- define "pdq.server" -}}
{{- if or .url .bundled -}}
{{ .url | default .bundled }}
{{- else if not (include "pdq.credentials" .root) -}}
{{ fail (printf "nothing says where %s is: set connections.%sUrl, or %s.enabled, or give a credentials Secret that says it" .what .what .chart) }}
{{- end -}}
{{- end -}}

{{- define "pdq.natsUrl" -}}
{{- $bundled := ternary (printf "nats://%s-nats:4222" .Release.Name) "" .Values.nats.enabled -}}
{{- include "pdq.server" (dict "root" . "url" .Values.connections.natsUrl "bundled" $bundled "what" "nats" "chart" "nats") -}}
{{- end -}}

{{- define "pdq.redisUrl" -}}
{{- $bundled := ternary (printf "redis://%s-valkey:6379/0" .Release.Name) "" .Values.valkey.enabled -}}
{{- include "pdq.server" (dict "root" . "url" .Values.connections.redisUrl "bundled" $bundled "what" "redis" "chart" "valkey") -}}
{{- end -}}

{{- define "pdq.credentials" -}}
{{- .Values.credentials.existingSecret | default (ternary (printf "%s-credentials" (include "pdq.fullname" .)) "" (not (empty .Values.credentials.values))) -}}
{{- end -}}

{{/* The components that this release runs, as a list. */}}
{{- define "pdq.components" -}}
{{- $found := list "bridge" }}
{{- range list "prefill" "decode" }}
{{- if (index $.Values .).enabled }}
{{- $found = append $found . }}
{{- end }}
{{- end }}
{{- if .Values.autoscaler.enabled }}
{{- $found = append $found "autoscaler" }}
{{- end }}
{{- append $found "reaper" | toJson }}
{{- end -}}

{{/* A setting's value. Helm reads all numbers as floats, and would write 1048576 as 1.048576e+06. */}}
{{- define "pdq.text" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* A model's name as one token of a NATS consumer name: pdq.core.names.token. */}}
{{- define "pdq.token" -}}
{{- . | urlquery | replace "+" "%20" | replace "." "%2E" | replace "~" "%7E" | replace "%" "=" -}}
{{- end -}}

{{/* What all pods have. Arguments: root, component, values (the component's). */}}
{{- define "pdq.podHead" -}}
metadata:
  labels:
    {{- include "pdq.labels" . | nindent 4 }}
  annotations:
    checksum/settings: {{ include (print .root.Template.BasePath "/settings.yaml") .root | sha256sum }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Arguments: root, values, asks: whether it asks Kubernetes anything. */}}
{{- define "pdq.podSpec" -}}
{{- if .asks }}
serviceAccountName: {{ include "pdq.fullname" .root }}-autoscaler
automountServiceAccountToken: true
{{- else }}
serviceAccountName: {{ include "pdq.fullname" .root }}
automountServiceAccountToken: false
{{- end }}
# Kubernetes would put PDQ_BRIDGE_PORT=tcp://... into every pod beside a Service of that name; pdq refuses such settings.
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pdq.volumes" -}}
volumes:
  - name: tmp
    emptyDir: {}
  {{- if and .model (eq .root.Values.engine "torch") }}
  - name: model
    {{- if not .root.Values.model.volume }}
    {{- fail "engine torch needs model.volume: where the model's files are" }}
    {{- end }}
    {{- toYaml .root.Values.model.volume | nindent 4 }}
  {{- end }}
  {{- with .root.Values.credentials.filesSecret }}
  - name: secrets
    secret: {secretName: {{ . }}, defaultMode: 0440}
  {{- end }}
{{- end -}}

{{- define "pdq.mounts" -}}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  {{- if and .model (eq .root.Values.engine "torch") }}
  - name: model
    mountPath: /models/{{ .root.Values.model.name }}
    {{- with .root.Values.model.subPath }}
    subPath: {{ . }}
    {{- end }}
    readOnly: true
  {{- end }}
  {{- if .root.Values.credentials.filesSecret }}
  - {name: secrets, mountPath: /etc/pdq/secrets, readOnly: true}
  {{- end }}
{{- end -}}

{{/* Settings: those of all programs, then secrets, then what this component overrides. */}}
{{- define "pdq.envFrom" -}}
envFrom:
  - configMapRef: {name: {{ include "pdq.fullname" .root }}}
  {{- with include "pdq.credentials" .root }}
  - secretRef: {name: {{ . }}}
  {{- end }}
{{- end -}}

{{- define "pdq.env" -}}
{{- range $name, $value := .values.settings }}
- {name: {{ $name }}, value: {{ include "pdq.text" $value | quote }}}
{{- end }}
{{- end -}}

{{/* What --model and --engine say. The mount's last part is the model's name. */}}
{{- define "pdq.modelArguments" -}}
{{- if eq .Values.engine "sim" -}}
["--engine", "sim", "--model", {{ .Values.model.name | quote }}]
{{- else -}}
["--engine", "torch", "--model", {{ printf "/models/%s" .Values.model.name | quote }}]
{{- end -}}
{{- end -}}

{{- define "pdq.containerSecurity" -}}
{{- $default := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL")) -}}
securityContext:
  {{- mergeOverwrite $default (deepCopy (.values.securityContext | default dict)) | toYaml | nindent 2 }}
{{- end -}}
